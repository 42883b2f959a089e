"""Registers the exporter, the command and the format of this distribution."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import CommandEntry, ExporterEntry


@hookimpl
def agl_exporters() -> Iterable[ExporterEntry]:
    """Register the exporter to tracing backends."""
    yield ExporterEntry(
        name="otlp",
        factory="agl_otlp.exporter:OtlpExporter",
        summary="finished rollouts as traces, to any backend that takes OTLP over HTTP",
    )


@hookimpl
def agl_commands() -> Iterable[CommandEntry]:
    """Register ``agl otlp``, and ``otlp`` as a format of ``agl export``."""
    yield CommandEntry(
        name="otlp", factory="agl_otlp.command:otlp", summary="send recorded rollouts to a tracing backend"
    )
    yield CommandEntry(
        name="otlp",
        parent="export",
        factory="agl_otlp.writer:OtlpWriter",
        summary="requests of OTLP with contents and token ids, as JSON lines or .pb",
    )
