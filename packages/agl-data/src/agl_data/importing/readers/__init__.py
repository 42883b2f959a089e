"""The formats that ``agl data import`` reads, and the choice of a format from a file's first record.

Each format is a module with two functions: ``fits(record)`` recognises the first record of a file, and ``read(path)``
yields the file's runs one at a time, without collecting them. A new format takes one module and one line here.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from agl.errors import DatasetError
from agl.schemas import Json
from agl_data.importing.readers import (
    agent_lightning,
    atif,
    chat,
    claude_code,
    codex,
    langfuse,
    langsmith,
    mlflow,
    otlp,
)
from agl_data.importing.runs import Run
from agl_data.importing.source import first_record
from agl_data.importing.wire import is_protobuf

__all__ = ["FORMATS", "Format", "format_of"]


class Format(NamedTuple):
    """A format in which another tool records runs.

    Attributes:
        name: The name for ``--format``.
        title: A description for people.
        fits: Returns true if a file's first record is in this format.
        read: Reads a file's runs in order; raises :class:`agl.errors.DatasetError` if the file is not in this format.
    """

    name: str
    title: str
    fits: Callable[[Json], bool]
    read: Callable[[Path], Iterator[Run]]


FORMATS = {
    found.name: found
    for found in (
        Format("chat", "OpenAI chat, one conversation with `messages` a line", chat.fits, chat.read),
        Format("claude-code", "session logs of Claude Code", claude_code.fits, claude_code.read),
        Format("codex", "session logs of Codex, rollout-*.jsonl", codex.fits, codex.read),
        Format("agent-lightning", "events of Agent Lightning 1.0's server", agent_lightning.fits, agent_lightning.read),
        Format("atif", "ATIF 1.0 to 1.8, as Harbor writes it", atif.fits, atif.read),
        Format(
            "otlp",
            "OTLP as JSON or Protobuf, with attributes of GenAI, OpenInference or Langfuse",
            otlp.fits,
            otlp.read,
        ),
        Format("langfuse", "exports of Langfuse, and its batches of events", langfuse.fits, langfuse.read),
        Format("langsmith", "runs of LangSmith, and their feedback", langsmith.fits, langsmith.read),
        Format("mlflow", "traces of MLflow 3", mlflow.fits, mlflow.read),
    )
}
"""The formats by name, in the order in which a file is matched against them."""


def format_of(path: Path) -> Format:
    """Recognise the format of a file; raises :class:`DatasetError` listing the known formats if none matches."""
    if is_protobuf(path):
        return FORMATS["otlp"]
    record = first_record(path)
    for found in FORMATS.values():
        if found.fits(record):
            return found
    fields = ", ".join(sorted(record)[:8]) if isinstance(record, dict) else type(record).__name__  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]  # any JSON
    listed = "; ".join(f"{found.name} ({found.title})" for found in FORMATS.values())
    raise DatasetError(
        f"{path} begins with a record of no known format (it has {fields or 'no fields'}); the formats are {listed}; "
        "name one with --format, or convert the file to one of them"
    )
