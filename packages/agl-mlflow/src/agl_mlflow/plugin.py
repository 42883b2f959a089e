"""Registers the sink of this distribution."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import ExporterEntry


@hookimpl
def agl_exporters() -> Iterable[ExporterEntry]:
    """Register the sink."""
    yield ExporterEntry(
        name="mlflow",
        factory="agl_mlflow.sink:MlflowSink",
        summary="steps, configuration, versions and candidates, in MLflow",
    )
