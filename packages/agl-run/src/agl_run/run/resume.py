"""Finds the state from which a run begins: a new state, or the saved state of a stopped or finished run.

A finished experiment continues if its file asks for more: for further steps of an algorithm, or for a new algorithm.
Each algorithm decides whether it has further steps to take; see :class:`~agl.contracts.ExtendableAlgorithm`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from agl.algorithms import AlgorithmConfig
from agl.contracts import ExperimentRecord, ExtendableAlgorithm, Store
from agl.errors import ConfigError
from agl_inspect.records.state import AlgorithmState, load_algorithm, load_experiment, load_last_versions, save_progress
from agl_run.config.sections import ScheduleConfig
from agl_run.config.training_settings import refuse_other_kind
from agl_run.plan import Plan
from agl_run.run.collector import cancel_unfinished
from agl_run.run.saving import remove_unreachable


class NothingMoreError(ConfigError):
    """The experiment to be resumed is finished, and its file asks for no further steps."""


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """The state from which a run begins; the run counts as started once every part is built and checked.

    Attributes:
        state: The experiment's state at the beginning.
        previous: The experiment's earlier record; ``None`` if the experiment never ran.
        reopened: States of the finished algorithms that continue, by name.
    """

    state: ExperimentRecord
    previous: ExperimentRecord | None = None
    reopened: Mapping[str, AlgorithmState] = field(default_factory=dict[str, AlgorithmState])

    async def mark_started(self, store: Store) -> None:
        """Save the state, which marks the experiment as started."""
        await save_progress(store, self.state, algorithms=self.reopened)

    async def take_back(self, store: Store) -> None:
        """Restore the earlier record after the run was refused; does nothing for a new experiment."""
        if self.previous is not None:
            await save_progress(store, self.previous)


async def begin(store: Store, plan: Plan, *, resume: bool, fresh: bool) -> Beginning:
    """Find the state from which a run begins, and mark an experiment that ran before as running.

    Raises:
        ConfigError: The experiment ran before, and neither ``resume`` nor ``fresh`` is set, or it cannot be continued.
        NothingMoreError: ``resume`` is set, and the finished experiment has nothing more to do.
    """
    name = plan.name
    previous = await load_experiment(store, name)
    reopened: dict[str, AlgorithmState] = {}
    agent = plan.agent.identity
    # A fresh start has a new number: its rollouts, versions and metrics never mix with those
    # before.
    if previous is None or fresh:
        state = ExperimentRecord(name=name, run=previous.run + 1 if previous else 1, agent=agent)
        # Otherwise workers elsewhere would run rollouts that no run needs any more.
        await cancel_unfinished(store, name)
    # One name belongs to one agent; comparisons over its history would be meaningless otherwise.
    elif is_of_another_agent(previous, plan):
        raise ConfigError(
            f"experiment {name!r} in this store runs the agent {previous.agent!r}, and this one is {agent!r}; give "
            "this run another name (name = ... in [experiment], or Trainer(name=...)), or pass --fresh (fresh=True) to "
            "give the name to this agent"
        )
    elif resume:
        states = {
            config.name: await load_algorithm(store, name, previous.run, config.name) or AlgorithmState()
            for config in plan.config.algorithm
        }
        # Refusals come before the first write, so a resume that is refused changes nothing.
        reopened = _reopened(plan, previous, states)
        # Rollouts of steps that were never saved wait for versions that are not live any more.
        await remove_unreachable(store, name, states)
        # A finished run may have its best versions live; further steps continue from the last ones,
        # whose optimizer state is saved.
        live = await load_last_versions(store, previous) if previous.status == "finished" else previous.live
        state = msgspec.structs.replace(previous, status="running", live=live, agent=agent)
    elif previous.status == "finished":
        raise ConfigError(
            f"experiment {name!r} is finished; pass --fresh (fresh=True) to run it again from its start, or ask for "
            "more steps in its file and pass --resume (resume=True) to continue it"
        )
    else:
        raise ConfigError(
            f"experiment {name!r} was started before and is not finished; pass --resume (resume=True) to continue it, "
            "or --fresh (fresh=True) to start again"
        )
    if previous is not None:
        await save_progress(store, state)  # workers of this experiment must not see it as finished
    return Beginning(state=state, previous=previous, reopened=reopened)


def is_of_another_agent(previous: ExperimentRecord, plan: Plan) -> bool:
    """Return true if the experiment's earlier record names an agent other than the plan's."""
    return previous.agent not in ("", plan.agent.identity)


def _reopened(
    plan: Plan, previous: ExperimentRecord, states: Mapping[str, AlgorithmState]
) -> dict[str, AlgorithmState]:
    """Return the states of finished algorithms that continue, by name; raises if there is nothing to continue."""
    configs = plan.config.algorithm
    for config in configs:
        refuse_other_kind(plan.name, config, states[config.name].settings)
    # A fixed point: reopening one algorithm may give another, which learns from it, more to do.
    going_on = {name for name, state in states.items() if not state.is_finished}
    for _ in configs:  # until nothing changes: an algorithm continues if one that it learns from does
        going_on |= {c.name for c in configs if c.name not in going_on and _has_more(plan, c, states, going_on)}
    if previous.status == "finished" and not going_on:
        raise _nothing_more(plan, states)
    opened = [c for c in configs if c.name in going_on and (states[c.name].is_finished or not states[c.name].step)]
    # Checked after the whole set is known, because an order in the file decides about pairs.
    for config in opened:
        _refuse_outdated_steps(config, configs, plan.config.schedule, states)
    return {
        config.name: msgspec.structs.replace(states[config.name], is_finished=False, stop_reason="")
        for config in opened
        if states[config.name].is_finished
    }


def _has_more(plan: Plan, config: AlgorithmConfig, states: Mapping[str, AlgorithmState], going_on: set[str]) -> bool:
    # Only the algorithm knows whether its budget leaves steps; it is asked without being set up.
    algorithm = plan.manager.build(plan.manager.algorithm(config.use), **config.params)
    return isinstance(algorithm, ExtendableAlgorithm) and algorithm.has_more(
        states[config.name].state,
        tasks=len(plan.train),
        sources_go_on=not going_on.isdisjoint(config.source),
    )


def _nothing_more(plan: Plan, states: Mapping[str, AlgorithmState]) -> NothingMoreError:
    reasons = "; ".join(f"{name}: {state.stop_reason}" for name, state in states.items())
    manager = plan.manager
    fixed = [
        config.name
        for config in plan.config.algorithm
        if not isinstance(manager.build(manager.algorithm(config.use), **config.params), ExtendableAlgorithm)
    ]
    never = f" {', '.join(fixed)} cannot be continued after the end." if fixed else ""
    return NothingMoreError(
        f"experiment {plan.name!r} is finished ({reasons or 'it has no algorithm'}) and its file asks for nothing "
        "more. Give an algorithm more steps, in the file or with --set, and pass --resume again; or pass --fresh "
        f"(fresh=True) to run it again from its start.{never}"
    )


def _refuse_outdated_steps(
    config: AlgorithmConfig,
    configs: Sequence[AlgorithmConfig],
    schedule: ScheduleConfig,
    states: Mapping[str, AlgorithmState],
) -> None:
    """Refuse further steps of an algorithm whose resources a later algorithm in the schedule has already tuned."""
    position = _position(config, configs, schedule)
    for later in configs:
        shared = set(config.tunes).intersection(later.tunes)
        if _position(later, configs, schedule) > position and shared and states[later.name].step:
            raise ConfigError(
                f"algorithm {config.name!r} asks for further steps on {sorted(shared)}, and {later.name!r}, which "
                f"comes after it, has trained that already. Give the steps to {later.name!r} and put "
                f"{config.name!r} back as it was, or start again with --fresh"
            )


def _position(config: AlgorithmConfig, configs: Sequence[AlgorithmConfig], schedule: ScheduleConfig) -> int:
    """Return the algorithm's position in the schedule; algorithms that do not run one by one share a position."""
    first = [other.name for other in configs if other.name in schedule.first]
    if config.name in first:
        # The algorithms of ``first`` run one by one before all others.
        return first.index(config.name)
    return len(first) + (configs.index(config) if schedule.mode == "sequential" else 0)
