"""The contract of sinks, which show a run in a system where people keep their experiments, such as W&B or MLflow.

A sink is registered and named like an exporter of rollouts: :class:`~agl.contracts.ExporterEntry`, ``[[exporter]]``.
The experiment reads its store and gives the sink what the store has; connections, pauses after errors and the thread
are the experiment's business, so a sink is a few blocking calls of a library.
"""

import hashlib
import re
from typing import Literal, Protocol, cast, runtime_checkable

from agl.schemas import Json, Record, to_json

__all__ = ["Cell", "Sink", "SinkOutcome", "SinkRow", "SinkRun", "SinkTable", "flat_config", "shortened"]

Cell = str | float | int | None
"""A cell of a table."""

LONGEST_NAME = 200
"""Characters of a metric's name; MLflow takes 250."""

_UNUSUAL = re.compile(r"[^A-Za-z0-9_.\- /]")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


class SinkRun(Record, frozen=True, kw_only=True):
    """The run that a sink shows.

    Attributes:
        id: Names the run in the other system: letters, digits, ``_`` and ``-``, at most 128. A resumed run has the id
            that it had, and no other run of any store has it.
        name: The experiment's name and the number of the run, such as ``small-2``.
        experiment: The experiment's name.
        run: The number of the run, from 1.
        agent: The agent that it runs, such as ``module:function``.
        config: The experiment as its file describes it, without secrets; algorithms are by name.
        folder: The experiment's work directory, where a sink that writes files does so by default.
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
        step: The algorithm's own step; of a validation the steps before it.
        experiment_step: Steps of all algorithms together, this one included: the axis on which they compare.
        time: Unix seconds at which the numbers were logged.
        metrics: The numbers by name; they may be infinite or no number.
    """

    algorithm: str
    step: int
    experiment_step: int
    time: float
    metrics: dict[str, float]

    @property
    def place(self) -> int:
        """Its place among the rows of the run, in which a validation comes after the step before it."""
        return 2 * self.experiment_step + (self.algorithm == "validate")

    def named(self) -> dict[str, float]:
        """Return the numbers as ``ALGORITHM/NAME``, with the two steps among them.

        Names hold ASCII letters, digits, ``_``, ``.``, ``-``, spaces and slashes, and at most 200 characters. One that
        had to be changed for that ends with a digest, so that two never become one.
        """
        numbers = {**self.metrics, "step": float(self.step), "experiment_step": float(self.experiment_step)}
        return {_plain(f"{self.algorithm}/{name}"): value for name, value in numbers.items()}


class SinkTable(Record, frozen=True, kw_only=True):
    """A table of the run as it is now; a later one of the same name replaces it.

    Attributes:
        name: ``resources``, ``candidates``, ``rollouts`` or ``alerts``.
        columns: The names of the columns.
        rows: The rows; texts have no control characters but line breaks and tabs, and long ones are cut with a mark.
    """

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


class SinkOutcome(Record, frozen=True, kw_only=True):
    """The end of a run.

    Attributes:
        status: ``stopped`` for a run that a person stopped.
        summary: Validation rewards, steps and live versions by name, such as ``reward_after``; of a run that did not
            reach its end only what is known.
        error: Why it failed, in words; ``""`` if it did not.
        time: Unix seconds of the end; 0 if it is not known.
    """

    status: Literal["finished", "failed", "stopped"]
    summary: dict[str, Json] = {}
    error: str = ""
    time: float = 0.0


@runtime_checkable
class Sink(Protocol):
    """Shows one run in another system; all methods are called in one thread, one after the other, and may block.

    Whatever a method raises is told once. After an error everything comes again from ``begin`` on, some time later; so
    it does, with the same id of the run, in a process that resumes the experiment. Writing twice must do no harm.
    """

    @property
    def destination(self) -> str:
        """The other system as messages name it, such as a URL without its keys."""
        ...

    def begin(self, run: SinkRun) -> None:
        """Make the run in the other system, or continue it."""
        ...

    def log(self, rows: list[SinkRow]) -> None:
        """Write rows in order of their ``place``.

        After ``begin`` all rows of the run come once, those from before it was resumed included; leave out what the
        other system has. A number that a step gets later comes as a further row of that step.
        """
        ...

    def show(self, tables: list[SinkTable]) -> None:
        """Write tables that are new or changed."""
        ...

    def end(self, end: SinkOutcome) -> str | None:
        """Say how the run ended, make everything durable, and release connections.

        Returns what was written, in words, for a line at the end of the run; ``None`` for the number of steps.
        """
        ...


def flat_config(config: dict[str, Json], prefix: str = "") -> dict[str, str]:
    """Return a configuration as texts by dotted name, such as ``algorithm.grpo.params.lr``."""
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            found |= flat_config(cast("dict[str, Json]", value), f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value if isinstance(value, str) else to_json(value).decode()
    return {_plain(name): text for name, text in found.items()}


def shortened(text: str, limit: int, *, rest: str = "") -> str:
    """Return a text of at most ``limit`` characters that any system takes: a longer one is cut, with a mark.

    Args:
        text: Any text; control characters and halves of characters become ``\\ufffd``.
        limit: Its greatest length.
        rest: How to read the whole text, for the mark.
    """
    clean = _CONTROL.sub("\ufffd", text)
    if len(clean) <= limit:
        return clean
    mark = f"… ({len(text)} characters{f'; all of it: {rest}' if rest else ''})"
    return clean[: max(0, limit - len(mark))] + mark


def _plain(name: str) -> str:
    """Return a name that every system takes, unchanged where it can be."""
    plain = _UNUSUAL.sub("_", name)
    plain = "/".join(part.strip(" .") or "_" for part in plain.split("/"))
    if plain == name and len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{plain[: LONGEST_NAME - len(digest) - 1]}-{digest}"
