"""Registers the sinks, the exporter to tracing backends, and its command."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import CommandEntry, ExporterEntry


@hookimpl
def agl_exporters() -> Iterable[ExporterEntry]:
    """Register everything that ``[[exporter]]`` may name."""
    yield ExporterEntry(
        name="wandb",
        factory="agl_sinks.wandb:WandbSink",
        summary="steps, configuration, versions and candidates, in Weights & Biases",
    )
    yield ExporterEntry(
        name="mlflow",
        factory="agl_sinks.mlflow:MlflowSink",
        summary="steps, configuration, versions and candidates, in MLflow",
    )
    yield ExporterEntry(
        name="tensorboard",
        factory="agl_sinks.tensorboard:TensorBoardSink",
        summary="steps, configuration, versions and candidates, as event files of TensorBoard",
    )
    yield ExporterEntry(
        name="webhook",
        factory="agl_sinks.webhook:WebhookSink",
        summary="findings, a collapse, a failure and the end of a run, as JSON to a web address",
    )
    yield ExporterEntry(
        name="otlp",
        factory="agl_sinks.otlp.exporter:OtlpExporter",
        summary="finished rollouts as traces, to any backend that takes OTLP over HTTP",
    )


@hookimpl
def agl_commands() -> Iterable[CommandEntry]:
    """Register ``agl data otlp``, and ``otlp`` as a format of ``agl data export``."""
    yield CommandEntry(
        name="otlp",
        parent="data",
        factory="agl_sinks.otlp.command:otlp",
        summary="send recorded rollouts to a tracing backend",
    )
    yield CommandEntry(
        name="otlp",
        parent="export",
        factory="agl_sinks.otlp.writer:OtlpWriter",
        summary="requests of OTLP with contents and token ids, as JSON lines or .pb",
    )
