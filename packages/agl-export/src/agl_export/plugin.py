"""Registers the formats below ``agl export``."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import CommandEntry

_FORMATS = {
    "atif": ("atif:AtifWriter", "trajectories of ATIF 1.8, one a line"),
    "langfuse": ("langfuse:LangfuseWriter", "batches of events that Langfuse's API ingests, one a line"),
    "tinker": ("tinker:TinkerWriter", "Tinker's datums, one a line"),
    "verl": ("verl:VerlWriter", "VERL's agent loop outputs, as JSON lines or .parquet"),
}


@hookimpl
def agl_commands() -> Iterable[CommandEntry]:
    """Register the formats; each builds an :class:`agl_run.exports.ExportWriter`."""
    for name, (factory, summary) in _FORMATS.items():
        yield CommandEntry(name=name, parent="export", factory=f"agl_export.{factory}", summary=summary)
