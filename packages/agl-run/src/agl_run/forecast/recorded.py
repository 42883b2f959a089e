"""Finds the rollouts that a plan is made from: training rollouts of the experiment, or those of its newest trial."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agl.contracts import Metric, RolloutQuery, Store
from agl.errors import NotFoundError
from agl.schemas import Record, Rollout, Weights
from agl_inspect.forecast.observed import Observed, observe
from agl_inspect.records.names import TRIAL, run_of
from agl_run.plan import Plan
from agl_run.run.episodes import episode_of, read_finished, selection_of, training_reward

LIMIT = 256
"""Rollouts at most that a plan is made from: the newest."""

ENOUGH = 8
"""Rollouts that are enough for a plan, if a task was run twice among them."""

_BATCH = 16
"""Rollouts that are in memory at once."""

_FINISHED = ("succeeded", "failed")


class Source(Record, frozen=True, kw_only=True):
    """The origin of a plan's rollouts.

    Attributes:
        experiment: The experiment that they are recorded as.
        run: Its run, from 1; 0 for a trial.
        rollouts: Their number.
        tasks: The number of different tasks.
        until: Unix seconds of the last one's end.
    """

    experiment: str
    run: int
    rollouts: int
    tasks: int
    until: float

    @property
    def is_enough(self) -> bool:
        """True if a plan can be made without running more."""
        return self.rollouts >= ENOUGH and self.tasks < self.rollouts


@dataclass(frozen=True, kw_only=True)
class Material:
    """The rollouts of a plan as each algorithm would train on them, and what a run has logged.

    Attributes:
        source: The origin of the rollouts.
        observed: The facts by the algorithm's name; by ``""`` in an experiment without one.
        metrics: The numbers of the run that made them; none for a trial.
        weights: The weights that they ran with, by the policy's name.
    """

    source: Source
    observed: dict[str, list[Observed]]
    metrics: list[Metric] = field(default_factory=list[Metric])
    weights: dict[str, Weights] = field(default_factory=dict[str, Weights])


async def find(store: Store, plan: Plan) -> tuple[Source, list[Rollout]] | None:
    """Find the newest training rollouts of the experiment, or else those of its newest trial; ``None`` without any.

    Rollouts that a run has recorded are taken before those of a trial if they are enough.
    """
    # Rollouts of a run say more than those of a trial: their lengths are those of the policy in
    # training.
    own, trial = await _of_run(store, plan.name), await _of_trial(store, f"{plan.name}{TRIAL}")
    found = [(_source(rollouts), rollouts) for rollouts in (own, trial) if rollouts]
    return next((each for each in found if each[0].is_enough), found[0] if found else None)


async def find_trial(store: Store, plan: Plan) -> tuple[Source, list[Rollout]]:
    """Find the rollouts of the experiment's newest trial, of which there must be one."""
    rollouts = await _of_trial(store, f"{plan.name}{TRIAL}")
    return _source(rollouts), rollouts


async def read(store: Store, plan: Plan, source: Source, rollouts: Sequence[Rollout]) -> Material:
    """Read finished rollouts, and reduce them to the facts that each algorithm of the experiment would see."""
    selections = {config.name: selection_of(plan, config) for config in plan.config.algorithm}
    selections = selections or {"": selection_of(plan, None)}
    observed: dict[str, list[Observed]] = {name: [] for name in selections}
    section = plan.config.experiment
    ids = [rollout.rollout_id for rollout in rollouts]
    # A second task next to each rollout shows whether rewards depend on the task at all.
    others = {one.rollout_id: _another(rollouts, place) for place, one in enumerate(rollouts)}
    # Rollouts may be megabytes; their facts are a few numbers.
    for start in range(0, len(ids), _BATCH):
        for recording in await read_finished(store, ids[start : start + _BATCH]):
            other = others[recording.rollout.rollout_id]
            for name, selection in selections.items():
                episode = episode_of(recording, selection)
                trains, left_out = training_reward(episode, section)
                observed[name].append(
                    observe(recording, episode, trains=trains, left_out=left_out, other=other.task if other else None)
                )
    metrics = await store.metrics(source.experiment, run=source.run) if source.run else []
    weights = await _weights(store, rollouts[0].resources) if rollouts else {}
    return Material(source=source, observed=observed, metrics=list(metrics), weights=weights)


async def _weights(store: Store, versions: Mapping[str, str]) -> dict[str, Weights]:
    """Return the weights among the versions of resources, where these are still in the store."""
    found: dict[str, Weights] = {}
    for name, version in versions.items():
        try:
            resource = (await store.resource(name, version)).resource
        except NotFoundError:
            continue
        found |= {name: resource} if isinstance(resource, Weights) else {}
    return found


async def _of_run(store: Store, name: str) -> list[Rollout]:
    query = RolloutQuery(
        experiment=name, mode="train", status=_FINISHED, sort="finished_at", limit=LIMIT, is_newest_first=True
    )
    found = await store.rollouts(query)
    return [one for one in found if run_of(one) == run_of(found[0])]


async def _of_trial(store: Store, name: str) -> list[Rollout]:
    query = RolloutQuery(experiment=name, status=_FINISHED, sort="finished_at", limit=LIMIT, is_newest_first=True)
    found = await store.rollouts(query)
    return [one for one in found if one.metadata.get("algorithm") == found[0].metadata.get("algorithm")]


def _source(rollouts: Sequence[Rollout]) -> Source:
    is_trial = rollouts[0].experiment.endswith(TRIAL)
    return Source(
        experiment=rollouts[0].experiment,
        run=0 if is_trial else run_of(rollouts[0]) or 0,
        rollouts=len(rollouts),
        tasks=len({one.group_id for one in rollouts}),
        until=max(one.finished_at for one in rollouts),
    )


def _another(rollouts: Sequence[Rollout], place: int) -> Rollout | None:
    """Return a rollout of another task, a different one for each task as far as there are."""
    own = rollouts[place].group_id
    behind = (rollouts[(place + shift) % len(rollouts)] for shift in range(1, len(rollouts)))
    return next((one for one in behind if one.group_id != own), None)
