"""The parts of ``agl suggest`` that look at several runs: the ranking of parameters, and the next run."""

import asyncio
import shlex
from collections.abc import Mapping
from pathlib import Path

from agl import PluginManager
from agl.contracts import Store
from agl.errors import ConfigError
from agl_run.cli.experiment import make_trainer, store_of
from agl_run.cli.logged import choice
from agl_run.cli.opening import with_store
from agl_run.cli.output import echo, print_table, short
from agl_run.experiment.fitted import FEWEST, Fit, fit
from agl_run.experiment.history import (
    History,
    PastRun,
    check_kind,
    history_of,
    kind_of_plan,
    parameters_of,
    runs_of_kind,
)
from agl_run.experiment.kept_fits import keep_fit
from agl_run.experiment.plan import MAX_NAME, Plan
from agl_run.experiment.settings import training_settings
from agl_run.experiment.state import load_experiment
from agl_run.experiment.validations import digest_of

NEXT = "-next-"
"""Stands between the name of an experiment and the number of a run of it that was proposed."""

_NAMED = 12
"""Runs that are named in a line."""


def suggest_next(manager: PluginManager, experiment: str | None, store_url: str | None) -> Fit:
    """Fit a model to the runs that compare with an experiment, and keep what it says in the store.

    Raises:
        ConfigError: No such experiment was validated, or none is named and there are several.
    """
    return with_store(manager, store_url, lambda store: _fitted(store, experiment))


def propose_for(file: Path, manager: PluginManager, experiment: str | None) -> tuple[Fit, tuple[str, ...]]:
    """Fit a model to the runs that compare with the one that a file asks for; returns it, and words for ``--set``.

    Raises:
        ConfigError: There is nothing to propose, or the file's run would not compare with those of ``experiment``.
    """
    plan = make_trainer(file, (), manager=manager).plan()
    store_url = store_of(plan.config, file)

    async def read(store: Store) -> tuple[Fit, str]:
        history = await _history_of_plan(store, plan, experiment, file=str(file))
        found = await _kept(store, history)
        names = {record.name for record in await store.experiments()}
        return found, _new_name(plan.name, names)

    found, name = with_store(manager, store_url, read)
    if not found.next:
        why = _lacking(found) if found.missing else " ".join(found.notes)
        raise ConfigError(f"no next run can be proposed: {why}")
    _check_left_out(plan, found.next, file=str(file))
    return found, (f"experiment.name={name}", *settings_of(found.next))


def settings_of(proposed: Mapping[str, str | None]) -> tuple[str, ...]:
    """Return the values of a proposed run as words for ``--set``."""
    return tuple(f"{key}={text}" for key, text in proposed.items() if text is not None)


def print_fit(found: Fit) -> None:
    """Print the ranking with its source, the best run, and the next one."""
    echo(_source(found))
    if found.best is not None:
        echo(f"best: {found.best.name}, {_reward(found.best)}; the best of several is partly luck")
    if found.missing:
        echo(_lacking(found))
        return
    if found.parameters:
        rows = [
            (one.name, f"{one.importance:.2f}", f"{one.low:.2f} to {one.high:.2f}", _chance(one.chance), one.tried)
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


def counted(manager: PluginManager, experiment: str, store_url: str | None) -> str:
    """Return how many runs compare with an experiment, in a sentence; ``""`` for fewer than two."""
    history = with_store(manager, store_url, lambda store: history_of(store, experiment))
    if history is None or len(history.runs) < 2:
        return ""
    if len(history.runs) < FEWEST:
        more = FEWEST - len(history.runs)
        return f"{len(history.runs)} runs compare with it; {more} more, and agl suggest --next ranks their parameters"
    return f"{len(history.runs)} runs compare with it: agl suggest {experiment} --next ranks their parameters"


async def _fitted(store: Store, experiment: str | None) -> Fit:
    name = experiment or await _only(store)
    history = await history_of(store, name)
    if history is None:
        raise ConfigError(
            f"experiment {name!r} has no validation in its newest run, by which it could be compared: give it "
            "validation tasks (val = ... in [experiment]) and at least one algorithm, and run it"
            if await load_experiment(store, name)
            else f"there is no experiment {name!r}; {choice(name, await _names(store))}"
        )
    return await _kept(store, history, experiment=name)


async def _kept(store: Store, history: History, *, experiment: str = "") -> Fit:
    """Fit a model, and keep it with the experiment or the last run of the history."""
    found = await asyncio.to_thread(fit, history)
    if found.parameters:
        record = await load_experiment(store, experiment or history.runs[-1].experiment)
        if record is not None:
            await keep_fit(store, record, found)
    return found


async def _history_of_plan(store: Store, plan: Plan, experiment: str | None, *, file: str) -> History:
    val = plan.val[: plan.config.experiment.validation_limit or None]
    kind = kind_of_plan(plan.config, agent=plan.agent.identity, train=digest_of(plan.train), val=digest_of(val))
    if experiment is None:
        return await runs_of_kind(store, kind)
    history = await history_of(store, experiment)
    if history is None or not history.runs:
        raise ConfigError(f"no run that compares with experiment {experiment!r} has ended with a validation")
    check_kind(kind, history, file=file)
    return history


def _check_left_out(plan: Plan, proposed: Mapping[str, str | None], *, file: str) -> None:
    """Refuse a proposal to leave out what the file sets: ``--set`` cannot take a key away."""
    own = parameters_of({each.name: training_settings(plan.config, each) for each in plan.config.algorithm})
    fixed = [key for key, text in proposed.items() if text is None and own.get(key, "null") != "null"]
    if fixed:
        raise ConfigError(
            f"the proposed run leaves out {' and '.join(fixed)}, which {file} sets; remove it there, and start again"
        )


def _new_name(name: str, taken: set[str]) -> str:
    """Return a name for the next run of an experiment that no other one has."""
    base = name.partition(NEXT)[0][: MAX_NAME - len(NEXT) - 5]
    return next(f"{base}{NEXT}{number}" for number in range(1, len(taken) + 2) if f"{base}{NEXT}{number}" not in taken)


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
    runs = f"{len(names)} comparable run{'' if len(names) == 1 else 's'}{f' ({shown})' if shown else ''}"
    return f"{runs}: same agent ({short(found.agent)}), tasks, validation, rewards and algorithms{left}"


def _reward(run: PastRun) -> str:
    ends = "" if run.low is None or run.high is None else f", 95 % [{run.low:.3f}, {run.high:.3f}]"
    tasks = f"{run.tasks} task{'' if run.tasks == 1 else 's'}"
    return f"validation reward {run.mean:.3f}{ends} over {tasks}, after step {run.turn}"


def _lacking(found: Fit) -> str:
    more = f"{found.missing} more comparable run{'' if found.missing == 1 else 's'}"
    how = "agl run FILE --set experiment.name=OTHER --set KEY=VALUE"
    return f"a model needs {FEWEST} runs to rank parameters: {more} first, with other values ({how})"


def _chance(value: float) -> str:
    return "below 0.001" if value < 0.001 else f"{value:.3f}"
