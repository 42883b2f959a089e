"""Registers the sinks, the exporter ``otlp``, the command ``agl data otlp``, and the export format ``otlp``."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import CommandEntry, ExporterEntry

_EXPORTERS = {
    "wandb": ("wandb:WandbSink", "steps, configuration, versions and candidates, in Weights & Biases"),
    "mlflow": ("mlflow:MlflowSink", "steps, configuration, versions and candidates, in MLflow"),
    "tensorboard": (
        "tensorboard:TensorBoardSink",
        "steps, configuration, versions and candidates, as event files of TensorBoard",
    ),
    "webhook": (
        "webhook:WebhookSink",
        "findings, a collapse, a failure and the end of a run, as JSON to a web address",
    ),
    "otlp": ("otlp.exporter:OtlpExporter", "finished rollouts as traces, to any backend that takes OTLP over HTTP"),
}
_COMMANDS = {
    "data": ("otlp.command:otlp", "send recorded rollouts to a tracing backend"),
    "export": ("otlp.requests:OtlpWriter", "requests of OTLP with contents and token ids, as JSON lines or .pb"),
}


@hookimpl
def agl_exporters() -> Iterable[ExporterEntry]:
    """Register the sinks and the exporter ``otlp`` for ``[[exporter]]``."""
    for name, (factory, summary) in _EXPORTERS.items():
        yield ExporterEntry(name=name, factory=f"agl_sinks.{factory}", summary=summary)


@hookimpl
def agl_commands() -> Iterable[CommandEntry]:
    """Register ``agl data otlp``, and ``otlp`` as a format of ``agl data export``."""
    for parent, (factory, summary) in _COMMANDS.items():
        yield CommandEntry(name="otlp", parent=parent, factory=f"agl_sinks.{factory}", summary=summary)
