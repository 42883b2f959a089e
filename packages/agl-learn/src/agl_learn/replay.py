"""Replay: runs the old and the new versions side by side on held-out conversations, with the same seeds.

The rollouts are recorded as the experiment ``NAME-replay-CANDIDATE``. Their ids depend on the candidate and on the
position of the task only, and the tasks are saved before anything runs. So a replay that was killed finds the rollouts
that have ended in the store, and runs the rest.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from statistics import fmean

from agl.contracts import ExperimentRecord
from agl.schemas import Episode
from agl_inspect.records.learning import LearningCandidate, ReplayPair, ReplayTask
from agl_learn.contracts import Conversation
from agl_learn.settings import LearnerFile
from agl_run import Quiet
from agl_run.engine import load_dataset, trial

FIRST = 8
"""The number of tasks that run at once at first; each further batch is twice as long."""

MOST = 64
"""The most tasks that run at once."""

REGRESSION = "regression"
"""The kind of the regression tasks."""


class TrialReplayer:
    """Runs pairs of rollouts; see :class:`~agl_learn.contracts.Replayer`."""

    def __init__(self, file: LearnerFile) -> None:
        self._file = file

    async def pairs(
        self, candidate: LearningCandidate, held_out: Sequence[Conversation], *, start: int
    ) -> AsyncIterator[ReplayPair]:
        """Yield the pairs from ``start`` on, batch by batch; a batch runs when the one before it is used up."""
        name = f"{self._file.name}-replay-{candidate.id}"
        tasks = await self._tasks(name, candidate, held_out)
        if start >= len(tasks):
            return
        given = [each.task for each in tasks]
        plan = self._file.plan(self._file.experiment(name), train=given, val=given)
        old, new = candidate.baseline, {**candidate.baseline, **candidate.versions}
        arms = [old, new, old] if self._file.settings.gate.replay.control else [old, new]
        async with trial(plan, record_as=name, progress=Quiet(), live=old) as driver:
            for begin, end in batches(tasks, start=start):
                collector = driver.collector(f"from-{begin}", None)
                rollouts = collector.side_by_side(given[begin:end], arms, n=1)
                episodes = sorted(await collector.run(rollouts), key=lambda each: each.rollout.rollout_id)
                for position in range(max(begin, start), end):
                    place = (position - begin) * len(arms)  # ids sort by task and then by arm
                    yield pair_of(tasks[position], episodes[place : place + len(arms)])

    async def _tasks(
        self, name: str, candidate: LearningCandidate, held_out: Sequence[Conversation]
    ) -> list[ReplayTask]:
        """Return the tasks of the candidate's replay, which are chosen when it begins for the first time."""
        shelf, store = self._file.records.replays, self._file.store
        if known := await shelf.get(store, candidate.id):
            return known
        newest = sorted(held_out, key=lambda each: each.started_at, reverse=True)[: candidate.rules.tasks]
        tasks = [ReplayTask(unit=each.user or each.rollout_id, kind=each.kind, task=each.task) for each in newest]
        if regression := self._file.settings.gate.replay.regression:
            given = load_dataset(self._file.folder / regression)
            tasks += [ReplayTask(unit=f"{REGRESSION}-{n}", kind=REGRESSION, task=task) for n, task in enumerate(given)]
        # With a record of its own, a replay keeps its queue over a restart.
        record = ExperimentRecord(name=name, status="finished", live=candidate.baseline)
        await store.save_state(shelf.states({candidate.id: tasks}), experiment=record)
        return tasks


def batches(tasks: Sequence[ReplayTask], *, start: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last position (exclusive) of each batch that has a task from ``start`` on.

    Batches do not depend on ``start``, and none has both conversations and regression tasks.
    """
    begin, size = 0, FIRST
    split = next((n for n, each in enumerate(tasks) if each.kind == REGRESSION), len(tasks))
    while begin < len(tasks):
        end = min(begin + size, split if begin < split else len(tasks))
        if end > start:
            yield begin, end
        begin, size = end, min(2 * size, MOST)


def pair_of(task: ReplayTask, episodes: Sequence[Episode]) -> ReplayPair:
    """Return the rewards of the old, the new and perhaps the control rollout of a task.

    A failed rollout counts as 0. If a rollout succeeded without a reward, such as after an outage of a judge, the pair
    shows no difference.
    """
    rewards = [each.reward if each.rollout.status == "succeeded" else 0.0 for each in episodes]
    known = [each for each in rewards if each is not None]
    if len(known) < len(rewards):
        known = [fmean(known) if known else 0.0] * len(rewards)
    return ReplayPair(
        unit=task.unit,
        kind=task.kind,
        old=known[0],
        new=known[1],
        control=known[2] if len(known) > 2 else None,
        rollouts=[each.rollout.rollout_id for each in episodes],
    )
