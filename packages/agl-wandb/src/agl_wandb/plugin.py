"""Registers the sink of this distribution."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import ExporterEntry


@hookimpl
def agl_exporters() -> Iterable[ExporterEntry]:
    """Register the sink."""
    yield ExporterEntry(
        name="wandb",
        factory="agl_wandb.sink:WandbSink",
        summary="steps, configuration, versions and candidates, in Weights & Biases",
    )
