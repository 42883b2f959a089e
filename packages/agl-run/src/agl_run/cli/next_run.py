"""The part of ``agl run --next`` that proposes the parameters of the next run from comparable ones."""

from collections.abc import Mapping
from pathlib import Path

from agl import PluginManager
from agl.contracts import Store
from agl.errors import ConfigError
from agl_inspect.advice import Fit, History, kind_of, parameters_of, runs_of_kind
from agl_inspect.records import MAX_NAME, digest_of
from agl_inspect.terminal import fit_and_record, lacking, settings_of, with_store
from agl_run.config.settings import training_settings
from agl_run.plan import Plan
from agl_run.terminal import make_trainer, store_of

NEXT = "-next-"
"""Stands between the name of an experiment and the number of a run of it that was proposed."""


def propose_for(file: Path, manager: PluginManager, settings: tuple[str, ...]) -> tuple[Fit, tuple[str, ...]]:
    """Fit a model to the runs that compare with the one that a file asks for; returns it, and words for ``--set``.

    Raises:
        ConfigError: There is nothing to propose, or the file's run has parameters that the proposal leaves out.
    """
    plan = make_trainer(file, settings, manager=manager).plan()
    store_url = store_of(plan.config, file)

    async def read(store: Store) -> tuple[Fit, str]:
        history = await _history_of_plan(store, plan)
        found = await fit_and_record(store, history)
        names = {record.name for record in await store.experiments()}
        return found, _new_name(plan.name, names)

    found, name = with_store(manager, store_url, read)
    if not found.next:
        why = lacking(found) if found.missing else " ".join(found.notes)
        raise ConfigError(f"no next run can be proposed: {why}")
    _check_left_out(plan, found.next, file=str(file))
    return found, (f"experiment.name={name}", *settings_of(found.next))


async def _history_of_plan(store: Store, plan: Plan) -> History:
    """Read the runs that compare with the one that a file asks for."""
    val = plan.val[: plan.config.experiment.validation_limit or None]
    settings = {each.name: training_settings(plan.config, each) for each in plan.config.algorithm}
    kind = kind_of(settings, agent=plan.agent.identity, train=digest_of(plan.train), val=digest_of(val))
    return await runs_of_kind(store, kind)


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
