"""The contracts of exporters of rollouts and of sinks, which show a run in another system, such as W&B or MLflow.

A sink is registered and named like an exporter of rollouts: :class:`~agl.contracts.ExporterEntry`, ``[[exporter]]``.
The experiment reads the numbers from its store and passes them to the sink. It also runs the sink's thread, and pauses
and retries after errors. So a sink is only a few blocking calls of a library.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Literal, Protocol, cast, runtime_checkable

from agl.contracts._store import Recording
from agl.schemas import Json, Record, to_json

__all__ = ["Cell", "Exporter", "Sink", "SinkOutcome", "SinkRow", "SinkRun", "SinkTable", "flat_config", "shortened"]

Cell = str | float | int | None
"""The value of one cell of a :class:`SinkTable`."""

LONGEST_NAME = 200
"""Largest number of characters in a metric's name; MLflow accepts 250."""

_UNUSUAL = re.compile(r"[^A-Za-z0-9_.\- /]")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


class Exporter(Protocol):
    """Sends finished rollouts to another system.

    Used by one task at a time. After a restart or an error a rollout may be exported again, so sending a rollout twice
    must do no harm.
    """

    @property
    def destination(self) -> str:
        """A name of the other system for messages, such as its URL without keys."""
        ...

    async def export(self, recordings: Sequence[Recording]) -> None:
        """Send finished rollouts with all of their spans.

        Raises :class:`~agl.errors.ExportError`; if the error's ``is_passing`` is true, the caller repeats the call
        later.
        """
        ...

    async def close(self) -> None:
        """Release connections; idempotent."""
        ...


class SinkRun(Record, frozen=True, kw_only=True):
    """The run that a sink shows.

    Attributes:
        id: The run's id in the other system: at most 128 letters, digits, ``_`` and ``-``. A run keeps its id when it
            is resumed, and no other run of any store has the same id.
        name: The experiment's name and the number of the run, such as ``small-2``.
        experiment: The experiment's name.
        run: The number of the run, from 1.
        agent: The run's agent, such as ``module:function``.
        config: The contents of the experiment's file, without secrets; its algorithms are keyed by name.
        folder: The experiment's work directory, which is the default folder of a sink that writes files.
    """

    id: str
    name: str
    experiment: str
    run: int
    agent: str = ""
    config: dict[str, Json] = {}
    folder: str = ""


class SinkRow(Record, frozen=True, kw_only=True):
    """The numbers of one step of one algorithm, or of one validation.

    Attributes:
        algorithm: The algorithm's name, or ``validate``.
        step: The algorithm's own step; for a validation, the number of steps that all algorithms took before it.
        experiment_step: The number of steps of all algorithms, including this one; an axis that all of them share.
        time: Unix seconds at which the numbers were logged.
        metrics: The numbers by name; they may be infinite or NaN.
    """

    algorithm: str
    step: int
    experiment_step: int
    time: float
    metrics: dict[str, float]

    @property
    def place(self) -> int:
        """The row's position in the run; a validation comes right after the step that it validates."""
        return 2 * self.experiment_step + (self.algorithm == "validate")

    def named(self) -> dict[str, float]:
        """Return the numbers by ``ALGORITHM/NAME``, including ``step`` and ``experiment_step``.

        Names have at most 200 characters, which are ASCII letters, digits, ``_``, ``.``, ``-``, spaces and slashes. A
        name that had to be changed ends with a digest, so that two names never become equal.
        """
        numbers = {**self.metrics, "step": float(self.step), "experiment_step": float(self.experiment_step)}
        return {_plain(f"{self.algorithm}/{name}"): value for name, value in numbers.items()}


class SinkTable(Record, frozen=True, kw_only=True):
    """A table about the current state of the run; it replaces the earlier table of the same name.

    Attributes:
        name: ``resources``, ``candidates``, ``rollouts`` or ``alerts``.
        columns: The names of the columns.
        rows: The rows. Texts have no control characters other than line breaks and tabs; a text that was shortened
            says so at its end.
    """

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


class SinkOutcome(Record, frozen=True, kw_only=True):
    """The end of a run.

    Attributes:
        status: The status; ``stopped`` for a run that a person stopped.
        summary: Validation rewards, steps and live versions by name, such as ``reward_after``. A run that did not reach
            its end lacks some of them.
        error: The reason why the run failed, as text; ``""`` if it did not fail.
        time: Unix seconds of the end; 0 if the time is not known.
    """

    status: Literal["finished", "failed", "stopped"]
    summary: dict[str, Json] = {}
    error: str = ""
    time: float = 0.0


@runtime_checkable
class Sink(Protocol):
    """Shows one run in another system. All methods are called in one thread, one after the other, and may block.

    If a method raises, the user is informed once, and after a pause everything is sent again, starting with ``begin``.
    The same happens, with the same run id, in a process that resumes the experiment. So writing twice must do no harm.
    """

    @property
    def destination(self) -> str:
        """A name of the other system for messages, such as its URL without keys."""
        ...

    def begin(self, run: SinkRun) -> None:
        """Create the run in the other system, or continue it if it exists there."""
        ...

    def log(self, rows: list[SinkRow]) -> None:
        """Write rows, which come in order of their ``place``.

        After ``begin``, all rows of the run are passed once, including those from before it was resumed; skip rows that
        the other system already has. A number that is logged for an earlier step comes as a further row of that step.
        """
        ...

    def show(self, tables: list[SinkTable]) -> None:
        """Write tables that are new or have changed."""
        ...

    def end(self, end: SinkOutcome) -> str | None:
        """Record the end of the run, make everything durable, and release connections.

        Returns a description of what was written, for a line that is shown at the end of the run; ``None`` to show the
        number of steps.
        """
        ...


def flat_config(config: dict[str, Json], prefix: str = "") -> dict[str, str]:
    """Flatten a configuration into texts by dotted name, such as ``algorithm.grpo.params.optim.lr``."""
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            found |= flat_config(cast("dict[str, Json]", value), f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value if isinstance(value, str) else to_json(value).decode()
    return {_plain(name): text for name, text in found.items()}


def shortened(text: str, limit: int, *, rest: str = "") -> str:
    """Shorten a text to ``limit`` characters, with a note at its end, and replace characters that some systems refuse.

    Args:
        text: Any text; control characters and lone surrogates become ``\\ufffd``.
        limit: Largest length of the result.
        rest: How to read the whole text; the note includes it.
    """
    clean = _CONTROL.sub("\ufffd", text)
    if len(clean) <= limit:
        return clean
    mark = f"… ({len(text)} characters{f'; all of it: {rest}' if rest else ''})"
    return clean[: max(0, limit - len(mark))] + mark


def _plain(name: str) -> str:
    """Return the name in a form that every system accepts; a name that is acceptable stays unchanged."""
    plain = _UNUSUAL.sub("_", name)
    plain = "/".join(part.strip(" .") or "_" for part in plain.split("/"))
    if plain == name and len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{plain[: LONGEST_NAME - len(digest) - 1]}-{digest}"
