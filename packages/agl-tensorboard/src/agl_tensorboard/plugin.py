"""Registers the sink of this distribution."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import ExporterEntry


@hookimpl
def agl_exporters() -> Iterable[ExporterEntry]:
    """Register the sink."""
    yield ExporterEntry(
        name="tensorboard",
        factory="agl_tensorboard.sink:TensorBoardSink",
        summary="steps, configuration, versions and candidates, as event files of TensorBoard",
    )
