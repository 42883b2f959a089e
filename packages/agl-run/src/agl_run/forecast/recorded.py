"""Finds the rollouts from which a forecast is made: recorded training rollouts, or the experiment's newest trial."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agl.contracts import Metric, RolloutQuery, Store
from agl.errors import NotFoundError
from agl.schemas import Record, Rollout, Weights
from agl_inspect.forecast.observed import Observed, observe
from agl_inspect.records.names import TRIAL, run_of
from agl_run.plan import Plan
from agl_run.run.training_episodes import episode_of, read_finished, selection_of, training_reward

LIMIT = 256
"""The most rollouts from which a forecast is made; the newest ones are taken."""

ENOUGH = 8
"""The least number of rollouts for a forecast; they must include at least one task that ran twice."""

_BATCH = 16
"""The most rollouts that are held in memory at once."""

_FINISHED = ("succeeded", "failed")


class Source(Record, frozen=True, kw_only=True):
    """The origin of the rollouts from which a forecast is made.

    Attributes:
        experiment: The experiment under which the rollouts are recorded.
        run: The number of the run that recorded them, from 1; 0 for a trial.
        rollouts: The number of rollouts.
        tasks: The number of different tasks.
        until: The time at which the last rollout finished, in Unix seconds.
    """

    experiment: str
    run: int
    rollouts: int
    tasks: int
    until: float

    @property
    def is_enough(self) -> bool:
        """True if there are enough rollouts for a forecast, and at least one task ran twice."""
        return self.rollouts >= ENOUGH and self.tasks < self.rollouts


@dataclass(frozen=True, kw_only=True)
class Material:
    """The data of a forecast: facts about recorded rollouts, and the metrics of the run that recorded them.

    Attributes:
        source: The origin of the rollouts.
        observed: The facts about each rollout as an algorithm would train on it, by the algorithm's name; the key is
            ``""`` in an experiment without algorithms.
        metrics: The metrics of the run that recorded the rollouts; empty for a trial.
        weights: The weights with which the rollouts ran, by the policy's name.
    """

    source: Source
    observed: dict[str, list[Observed]]
    metrics: list[Metric] = field(default_factory=list[Metric])
    weights: dict[str, Weights] = field(default_factory=dict[str, Weights])


async def find(store: Store, plan: Plan) -> tuple[Source, list[Rollout]] | None:
    """Find the newest training rollouts of the experiment, or the rollouts of its newest trial.

    A run's rollouts are preferred to a trial's, unless only the trial's are enough for a forecast. Returns ``None`` if
    neither a run nor a trial is recorded.
    """
    # A run's rollouts are better evidence than a trial's: they have the lengths of the policy in
    # training.
    own, trial = await _of_run(store, plan.name), await _of_trial(store, f"{plan.name}{TRIAL}")
    found = [(_source(rollouts), rollouts) for rollouts in (own, trial) if rollouts]
    return next((each for each in found if each[0].is_enough), found[0] if found else None)


async def find_trial(store: Store, plan: Plan) -> tuple[Source, list[Rollout]]:
    """Return the rollouts of the experiment's newest trial, which must exist, and their origin."""
    rollouts = await _of_trial(store, f"{plan.name}{TRIAL}")
    return _source(rollouts), rollouts


async def read(store: Store, plan: Plan, source: Source, rollouts: Sequence[Rollout]) -> Material:
    """Read finished rollouts, and reduce them to the facts that each algorithm of the experiment would use."""
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
    """Return the weights among the given versions of resources; versions that the store no longer has are left out."""
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
    """Return a rollout of another task, searched from ``place`` onwards; ``None`` if all have the same task."""
    own = rollouts[place].group_id
    behind = (rollouts[(place + shift) % len(rollouts)] for shift in range(1, len(rollouts)))
    return next((one for one in behind if one.group_id != own), None)
