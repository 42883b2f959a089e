"""Replay: runs the old and the new versions side by side on held-out conversations, with the same seeds.

The rollouts are recorded as the experiment ``NAME-replay-CANDIDATE``. Their ids depend only on the candidate and on the
conversation. So a replay that was killed finds the rollouts that have ended in the store, and runs the rest.

A candidate that changes only prompts leaves many calls of a larger agent as they were. So one of the two rollouts runs
first, and the other one gets the recorded answer to each call that it repeats exactly. The answer was drawn for the
same request, so each rollout is as fair a sample as before; what they share adds no noise to their difference, and
costs nothing. Half of the pairs begin with the old versions, half with the new ones. The control shares nothing.
"""

import hashlib
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from msgspec import to_builtins
from msgspec.structs import replace

from agl.contracts import REPLAY, ExperimentRecord, ReplayPlan
from agl.errors import RunError
from agl.schemas import Episode, Json, PromptTemplate, Rollout, to_json
from agl_inspect.learning import REGRESSION
from agl_inspect.records.learning import LearningCandidate, ReplayPair
from agl_inspect.records.splits import SERVED
from agl_inspect.records.state import load_experiment
from agl_learn.contracts import Conversation
from agl_learn.settings import LearnerFile
from agl_run import Quiet
from agl_run.engine import Driver, load_dataset, trial

FIRST = 8
"""The number of pairs that run at once at first; each further batch has twice as many."""

MOST = 64
"""The most pairs that run at once."""


@dataclass(frozen=True, kw_only=True)
class _Task:
    """A task of a replay.

    Attributes:
        key: The name of the task in the ids of its rollouts.
        unit: The user, or the conversation if the user is unknown.
        kind: The kind of the task.
    """

    key: str
    unit: str
    kind: str
    task: Json


class TrialReplayer:
    """Runs pairs of rollouts; see :class:`~agl_learn.contracts.Replayer`."""

    def __init__(self, file: LearnerFile) -> None:
        self._file = file

    async def pairs(
        self, candidate: LearningCandidate, held_out: Sequence[Conversation], *, done: Collection[str]
    ) -> AsyncGenerator[ReplayPair]:
        """Yield the pairs batch by batch; a batch runs only if all pairs of the one before it were taken."""
        tasks = [each for each in self._tasks(held_out) if each.unit not in done]
        if not tasks:
            return
        name = f"{self._file.name}-replay-{candidate.id}"
        given = [each.task for each in tasks]
        plan = self._file.plan(self._file.experiment(name), train=given, val=given)
        old = {**await self._served(), **candidate.baseline}
        await self._record(name, old)
        new = {**old, **candidate.versions}
        arms = [old, new, old] if self._file.settings.gate.replay.control else [old, new]
        is_shared = await self._changes_only_prompts(candidate)
        async with trial(plan, record_as=name, progress=Quiet(), live=old, arms=[new]) as driver:
            collector = driver.collector(REGRESSION, None)
            for batch in batches(tasks):
                pairs = [_rollouts(driver, each, arms, is_shared=is_shared) for each in batch]
                episodes = await collector.run([rollout for pair in pairs for rollout in pair.first])
                episodes += await collector.run([rollout for pair in pairs for rollout in pair.second])
                found = {episode.rollout.rollout_id: episode for episode in episodes}
                if all(episode.rollout.status != "succeeded" for episode in episodes):
                    first = episodes[0].rollout.rollout_id
                    raise RunError(f"all {len(episodes)} rollouts of a batch failed; look at one: agl show {first}")
                for task, pair in zip(batch, pairs, strict=True):
                    if all(found[each].rollout.status != "succeeded" for each in pair.ids):
                        continue  # which says nothing about the versions
                    yield pair_of([found[each] for each in pair.ids], unit=task.unit, kind=task.kind)

    async def _changes_only_prompts(self, candidate: LearningCandidate) -> bool:
        """Return true if the candidate changes prompts only, whose texts are part of the requests.

        Other weights answer the same request in another way, and a value may set what is not part of a request, such as
        the server's address.
        """
        changed = [await self._file.store.resource(*each) for each in candidate.versions.items()]
        return all(isinstance(each.resource, PromptTemplate) for each in changed)

    def _tasks(self, held_out: Sequence[Conversation]) -> Iterator[_Task]:
        for each in held_out:
            key = _digest([each.rollout_id, each.task])
            yield _Task(key=key, unit=each.unit(self._file.settings.unit), kind=each.kind, task=each.task)
        regression = self._file.settings.gate.replay.regression
        for task in load_dataset(self._file.folder / regression) if regression else ():
            key = _digest(task)
            yield _Task(key=key, unit=f"{REGRESSION}-{key}", kind=REGRESSION, task=task)

    async def _served(self) -> dict[str, str]:
        """Return the served versions, of which a candidate may change only some."""
        split = await SERVED.get(self._file.store)
        return {} if split is None else split.versions.get(self._file.settings.label, {})

    async def _record(self, name: str, live: dict[str, str]) -> None:
        """Save a record of the experiment, without which a trial would cancel what a killed one has queued."""
        if await load_experiment(self._file.store, name) is None:
            record = ExperimentRecord(name=name, status="finished", live=live)
            await self._file.store.save_state({}, experiment=record)


def batches(tasks: Sequence[_Task]) -> Iterator[Sequence[_Task]]:
    """Split tasks into batches, each twice as long as the one before it."""
    begin, size = 0, FIRST
    while begin < len(tasks):
        yield tasks[begin : begin + size]
        begin, size = begin + size, min(2 * size, MOST)


def pair_of(episodes: Sequence[Episode], *, unit: str, kind: str) -> ReplayPair:
    """Return the rewards of the old, the new and perhaps the control rollout of a task.

    A failed rollout counts as 0. If a rollout succeeded without a reward, such as after an outage of a judge, the pair
    shows no difference.
    """
    rewards = [each.reward if each.rollout.status == "succeeded" else 0.0 for each in episodes]
    known = [each for each in rewards if each is not None]
    if len(known) < len(rewards):
        known = [fmean(known) if known else 0.0] * len(rewards)
    return ReplayPair(
        unit=unit,
        kind=kind,
        old=known[0],
        new=known[1],
        control=known[2] if len(known) > 2 else None,
        rollouts=[each.rollout.rollout_id for each in episodes],
    )


class _Pair(NamedTuple):
    """The rollouts of a task: their ids by arm, those that run first, and the one that gets answers from those."""

    ids: list[str]
    first: list[Rollout]
    second: list[Rollout]


def _rollouts(driver: Driver, task: _Task, arms: Sequence[dict[str, str]], *, is_shared: bool) -> _Pair:
    """Return the rollouts of a pair; either arm comes first in about half of the pairs, as a server may become slower.

    The task decides which one, so that a restart makes the same rollouts.
    """
    old, new, *control = rollouts = driver.collector(task.key, None).side_by_side([task.task], arms, n=1)
    ids = [each.rollout_id for each in rollouts]
    leader, follower = (old, new) if int(task.key, 16) % 2 else (new, old)
    if not is_shared:
        return _Pair(ids, [leader, follower, *control], [])
    plan = to_builtins(ReplayPlan(rollout_id=leader.rollout_id))
    return _Pair(ids, [leader, *control], [replace(follower, metadata={**follower.metadata, REPLAY: plan})])


def _digest(value: Json) -> str:
    return hashlib.blake2b(to_json(value), digest_size=8).hexdigest()
