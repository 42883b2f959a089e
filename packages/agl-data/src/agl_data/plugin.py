"""Registers the commands of ``agl data``, and the formats of ``agl data export``."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import CommandEntry

_FORMATS = {
    "atif": ("atif:AtifWriter", "trajectories of ATIF 1.8, one a line"),
    "langfuse": ("langfuse:LangfuseWriter", "batches of events that Langfuse's API ingests, one a line"),
    "tinker": ("tinker:TinkerWriter", "Tinker's datums, one a line"),
    "trl": ("trl_dataset:TrlWriter", "dialogues with pictures as a data set of TRL, as .parquet"),
    "verl": ("verl:VerlWriter", "VERL's agent loop outputs, as JSON lines or .parquet"),
}

_COMMANDS = {
    "import": ("importing.command:import_runs", "import runs that other tools recorded"),
    "export": ("export.command:export", "write recorded data as JSON lines, or for another tool"),
    "archive": ("archive.command:archive", "write finished rollouts as Parquet files"),
    "restore": ("archive.command:restore", "bring archived rollouts back into a store"),
    "copy": ("copying:copy", "copy experiments to another store"),
}


@hookimpl
def agl_commands() -> Iterable[CommandEntry]:
    """Register the commands and the formats; a format's factory makes an :class:`agl_inspect.exports.ExportWriter`."""
    for name, (factory, summary) in _COMMANDS.items():
        yield CommandEntry(name=name, parent="data", factory=f"agl_data.{factory}", summary=summary)
    for name, (factory, summary) in _FORMATS.items():
        yield CommandEntry(name=name, parent="export", factory=f"agl_data.export.{factory}", summary=summary)
