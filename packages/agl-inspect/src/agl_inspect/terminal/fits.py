"""Fits a model to the parameters of comparable runs, and saves and prints the fit with the proposed next run."""

import asyncio
import shlex
from collections.abc import Mapping

from agl.contracts import Store
from agl.errors import ConfigError
from agl.hints import count_of
from agl_inspect.advice.past_runs import (
    History,
    PastRun,
    history_of,
)
from agl_inspect.advice.ranking import FEWEST, Fit, add_fit, fit
from agl_inspect.records.metrics import choice
from agl_inspect.records.state import load_experiment
from agl_inspect.terminal.output import echo, print_table
from agl_inspect.text import ends, short

_NAMED = 12
"""The most runs that a line names."""


def settings_of(proposed: Mapping[str, str | None]) -> tuple[str, ...]:
    """Return a proposal as ``KEY=VALUE`` texts for ``--set``; keys to leave out are not among them."""
    return tuple(f"{key}={text}" for key, text in proposed.items() if text is not None)


def print_fit(found: Fit) -> None:
    """Print a fit: the runs, the best run, the ranking of the parameters, and the proposed next run."""
    echo(_source(found))
    if found.best is not None:
        echo(f"best: {found.best.name}, {_reward(found.best)}; the best of several is partly luck")
    if found.missing:
        echo(lacking(found))
        return
    if found.parameters:
        rows = [
            (
                one.name,
                f"{one.importance:.2f}",
                f"{one.low:.2f} to {one.high:.2f}",
                "below 0.001" if one.chance < 0.001 else f"{one.chance:.3f}",
                one.tried,
            )
            for one in found.parameters
        ]
        print_table(("parameter", "importance", "90 %", "by chance", "tried"), rows, least=("tried",))
    for note in found.notes:
        echo(note)
    if found.next:
        words = " ".join(f"--set {shlex.quote(each)}" for each in settings_of(found.next))
        absent = [key for key, text in found.next.items() if text is None]
        without = f", without {' and '.join(absent)}" if absent else ""
        echo(f"next, as Optuna's TPE proposes from these runs: {words}{without}")


async def counted(store: Store, experiment: str) -> str:
    """Return a sentence about the number of runs comparable with an experiment; ``""`` for fewer than two."""
    history = await history_of(store, experiment)
    if history is None or len(history.runs) < 2:
        return ""
    if len(history.runs) < FEWEST:
        more = FEWEST - len(history.runs)
        return f"{len(history.runs)} runs compare with it; {more} more, and agl metrics --rank ranks their parameters"
    return f"{len(history.runs)} runs compare with it: agl metrics {experiment} --rank ranks their parameters"


async def suggest_next(store: Store, experiment: str | None) -> Fit:
    """Fit a model to the runs that are comparable with an experiment, and save the fit in the store.

    Raises:
        ConfigError: The experiment does not exist, or its newest run has no validation; or ``experiment`` is ``None``
            and the store does not hold exactly one.
    """
    name = experiment or await _only(store)
    history = await history_of(store, name)
    if history is None:
        raise ConfigError(
            f"experiment {name!r} has no validation in its newest run, by which it could be compared: give it "
            "validation tasks (val = ... in [experiment]) and at least one algorithm, and run it"
            if await load_experiment(store, name)
            else f"there is no experiment {name!r}; {choice(name, await _names(store))}"
        )
    return await fit_and_record(store, history, experiment=name)


async def fit_and_record(store: Store, history: History, *, experiment: str = "") -> Fit:
    """Fit a model; if it ranks parameters, save the fit under ``experiment``, by default the last run's experiment."""
    found = await asyncio.to_thread(fit, history)
    if found.parameters:
        record = await load_experiment(store, experiment or history.runs[-1].experiment)
        if record is not None:
            await add_fit(store, record, found)
    return found


async def _only(store: Store) -> str:
    names = await _names(store)
    if len(names) != 1:
        raise ConfigError(f"name one of the runs to compare; {choice('', names)}")
    return names[0]


async def _names(store: Store) -> list[str]:
    return sorted(record.name for record in await store.experiments())


def _source(found: Fit) -> str:
    names = [run.name for run in found.runs]
    shown = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    left = f"; {found.unfinished} of the same kind have not ended and count for nothing" if found.unfinished else ""
    runs = f"{count_of(len(names), 'comparable run')}{f' ({shown})' if shown else ''}"
    return f"{runs}: same agent ({short(found.agent)}), tasks, validation, rewards and algorithms{left}"


def _reward(run: PastRun) -> str:
    mean = f"{run.mean:.3f}{ends(run.low, run.high)}"
    return f"validation reward {mean} over {count_of(run.tasks, 'task')}, after step {run.turn}"


def lacking(found: Fit) -> str:
    """Return a sentence about how many more runs a ranking needs, and how to make them."""
    more = count_of(found.missing, "more comparable run")
    how = "agl run FILE --set experiment.name=OTHER --set KEY=VALUE"
    return f"a model needs {FEWEST} runs to rank parameters: {more} first, with other values ({how})"
