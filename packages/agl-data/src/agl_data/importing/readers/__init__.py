"""The formats that are read, one module each, and the choice between them by a file's first record.

A module has two functions: ``fits(record)`` recognises the first record of a file, and ``read(path)`` yields its runs
one after the other, without keeping them. Another format is one more module and one more line here.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from agl.errors import DatasetError
from agl.schemas import Json
from agl_data.importing.readers import atif, chat, claude_code, codex, langfuse, langsmith, mlflow, otlp
from agl_data.importing.runs import Run
from agl_data.importing.source import first_record
from agl_data.importing.wire import is_protobuf

__all__ = ["FORMATS", "Format", "format_of"]


class Format(NamedTuple):
    """A format of runs.

    Attributes:
        name: As in ``--format``.
        title: The format for people.
        fits: Whether a file's first record is one of this format.
        read: Reads a file's runs in order; raises :class:`agl.errors.DatasetError` for one that is not in the format.
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
"""The formats by name, in the order in which they are tried."""


def format_of(path: Path) -> Format:
    """Recognise the format of a file; raises :class:`DatasetError` with a list of the known formats when none fits."""
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
