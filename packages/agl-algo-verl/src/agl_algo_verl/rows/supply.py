"""Supplies the groups of a step: collected for the step, or carried over from requests that ran during updates.

A group is the rollouts of one task. In synchronous training a step requests its groups and waits for all of them;
`agl_objectives.groups` draws their tasks and replaces silent groups. In asynchronous training every group is a separate
request: a number of batches is requested ahead, a step takes as many groups as a batch has, and the others continue
while the models learn. The age of a group counts versions of the policy, as in VERL. A group that is trained in the
step that requested it spans 1 version, and no group spans more than `max_off_policy_threshold`:

    wait   a step takes the groups in the order of their requests, and waits for the slowest
    drop   a step takes the first groups that finish; a group that finishes too late is dropped, counted and replaced

If a run goes back to earlier weights, groups that were requested before are dropped too, because the abandoned weights
wrote them.

`drop` never waits for a slow rollout, and so trains quick ones more often than slow ones; `wait` has no such bias.

Over a restart nothing is trained twice and nothing is lost: the state lists the groups that were requested and not
trained, with the versions that they were pinned to, and a repeated request finds the rollouts that already exist.

Deviation from VERL: its `wait` lets a finished group grow older than the threshold if younger groups were taken first;
the order here prevents that.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agl.errors import RunError
from agl_algo_verl.losses.choice import has_greedy
from agl_algo_verl.rows.rows import soft_overlong
from agl_objectives.groups import GroupSampler

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agl.contracts import AlgorithmContext, CallUse, Collected
    from agl.schemas import Episode, Json
    from agl_algo_verl.settings.settings import VerlSettings
    from agl_objectives.groups import Baseline


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups:
    """The groups of a step, with metrics to log.

    Attributes:
        groups: The rollouts of each task.
        metrics: The metrics, by name.
        dropped: The number of rollouts that were left out of the groups.
        uses: The uses of calls in replaced groups and greedy rollouts, by rollout id.
        baselines: The result of each group's greedy rollout, for estimators that compare with it.
    """

    groups: list[list[Episode]]
    metrics: dict[str, float]
    dropped: int
    uses: dict[str, tuple[CallUse, ...]] = field(default_factory=dict[str, "tuple[CallUse, ...]"])
    baselines: Sequence[Baseline] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """The request for one group.

    Attributes:
        number: The request's number, counted from 0 over the run; it decides the task.
        step: The step that made the request.
        live: The versions of resources that the group's rollouts are pinned to, by name.
    """

    number: int
    step: int
    live: dict[str, str]

    def saved(self) -> dict[str, Json]:
        """Return the request as JSON, for the algorithm's state."""
        return {"number": self.number, "step": self.step, "live": dict(self.live)}


@dataclass(slots=True, kw_only=True)
class PendingGroup:
    """A request for a group, and the asyncio task that collects the group."""

    request: GroupRequest
    answer: asyncio.Task[Collected] = field(repr=False)


class VerlSupply:
    """Supplies the groups of a run's steps.

    Args:
        context: The algorithm's context, whose `collect` runs the agents.
        settings: VERL's configuration.
        steps: Number of steps of the whole run; no group is requested that none of them would train.
    """

    def __init__(self, context: AlgorithmContext, settings: VerlSettings, *, steps: int) -> None:
        self._context, self._steps = context, steps
        self._size = min(settings.data.train_batch_size, len(context.train))
        self._n = settings.actor_rollout_ref.rollout.n
        self._v1 = settings.trainer.v1
        self._sampler = GroupSampler(
            "verl",
            count=self._size,
            n=self._n,
            refill=settings.sampling.refill,
            curriculum=settings.sampling.curriculum,
            mask_truncated=settings.sampling.mask_truncated,
            overlong=soft_overlong(settings),
            has_greedy=has_greedy(settings),
        )
        self._sampler.begin(context)
        self._asked, self._dropped = 0, 0  # groups over the whole run; dropped ones are among those asked for
        self._left = 0  # the step at whose end the run left its weights for earlier ones
        self._pending: list[PendingGroup] = []
        self._saved: list[GroupRequest] = []  # of a resumed run; asked for again with its first step

    async def take(self, step: int) -> StepGroups:
        """Return the groups of a step; raises RunError if no group of a whole batch is usable."""
        if not self._v1.is_async:
            found = await self._sampler.collect(step)
            counts = {f"dropped_{reason}": float(count) for reason, count in found.dropped.items()}
            return StepGroups(
                groups=found.groups,
                metrics=counts | found.metrics,
                dropped=found.dropped.total(),
                uses=found.uses,
                baselines=found.baselines,
            )
        for request in self._saved:
            self._start(request)
        self._saved = []
        self._ask(step)
        taken: list[tuple[GroupRequest, Collected]] = []
        unusable, stale = Counter[str](), 0  # of this step: errors by their text, and groups that came too late
        while len(taken) < self._size:
            done = await self._next()
            self._pending.remove(done)
            # A group requested in step s and trained in step t spans the versions s to t: t - s + 1 of them.
            is_old = step - done.request.step >= self._v1.sampler.max_off_policy_threshold
            if is_old or done.request.step <= self._left:
                stale += 1
                self._replace(step)
                continue
            found = await self._answer(done, unusable)
            if found is None:
                self._replace(step)
            else:
                taken.append((done.request, found))
        ages = [step - request.step for request, _ in taken]  # 0: asked for in this step
        # In the order of their requests, so that the updates do not depend on which rollout finished first.
        supplied = _supplied([found for _, found in sorted(taken, key=lambda pair: pair[0].number)])
        metrics = {
            "groups_carried": float(len(self._pending)),
            "groups_stale": float(stale),
            "groups_unusable": float(unusable.total()),
            "staleness": sum(ages) / len(ages),
            "staleness_max": float(max(ages)),
        }
        lost = supplied.dropped + unusable.total() * self._n
        return StepGroups(groups=supplied.groups, metrics=supplied.metrics | metrics, dropped=lost)

    def go_back(self, *, step: int) -> None:
        """Record that training left the weights of `step`: groups requested up to then are not trained any more."""
        self._left = step

    def state(self) -> dict[str, Json]:
        """Return the state to save, as JSON: the requested groups that are not trained yet."""
        # Before the first step of a resumed run, the requests in the saved state have not been made again.
        waiting = [pending.request for pending in self._pending] or self._saved
        return {
            "asked": self._asked,
            "dropped": self._dropped,
            "left": self._left,
            "pending": [request.saved() for request in waiting],
            "groups": self._sampler.state(),
        }

    def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from `state`; the next step repeats the requests that were pending."""
        self._asked, self._dropped = int(state["asked"]), int(state["dropped"])
        self._left = int(state["left"])
        self._sampler.restore(state["groups"])
        self._saved = [
            GroupRequest(number=int(entry["number"]), step=int(entry["step"]), live=dict(entry["live"]))
            for entry in state["pending"]
        ]

    async def close(self) -> None:
        """Stop waiting for the requested groups; their rollouts stay in the store."""
        answers = [pending.answer for pending in self._pending]
        self._pending = []
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)

    def _ask(self, step: int) -> None:
        """Request groups ahead for this step, but never more than the remaining steps will train."""
        batches = min(step + self._v1.colocate_async.num_warmup_batches, self._steps)
        # Dropped groups train nothing, so as many may be requested again.
        while self._asked - self._dropped < batches * self._size:
            self._start(GroupRequest(number=self._asked, step=step, live=dict(self._context.live())))
            self._asked += 1

    def _replace(self, step: int) -> None:
        self._dropped += 1
        self._ask(step)

    def _start(self, request: GroupRequest) -> None:
        asked = self._context.collect(
            [task_at(self._context, request.number)],
            step=request.step,
            n=self._n,
            resources=request.live,
            key=f"group{request.number}",
        )
        self._pending.append(PendingGroup(request=request, answer=asyncio.create_task(asked)))

    async def _next(self) -> PendingGroup:
        """Wait for the group that the step takes next, and return it."""
        if self._v1.sampler.max_off_policy_strategy == "wait":
            first = min(self._pending, key=lambda pending: pending.request.number)
            await asyncio.wait({first.answer})
            return first
        await asyncio.wait({pending.answer for pending in self._pending}, return_when=asyncio.FIRST_COMPLETED)
        return next(pending for pending in self._pending if pending.answer.done())

    async def _answer(self, done: PendingGroup, unusable: Counter[str]) -> Collected | None:
        """Return the rollouts of a finished group, or None if no rollout of the group is usable.

        Raises RunError once as many groups of one step are unusable as a batch has, because then something is broken.
        """
        try:
            return await done.answer
        except RunError as error:
            unusable[str(error)] += 1
            if unusable.total() >= self._size:
                raise
            return None


def task_at(context: AlgorithmContext, position: int) -> Json:
    """Return the task at a position of the run; each epoch is a shuffle determined by seed, algorithm and epoch.

    Within an epoch no task occurs twice.
    """
    tasks: Sequence[Json] = context.train
    epoch, index = divmod(position, len(tasks))
    # A pure function of the position: a resumed run needs no saved order, and requests the same tasks.
    order = list(range(len(tasks)))
    random.Random(f"{context.seed}/{context.name}/{epoch}").shuffle(order)
    return tasks[order[index]]


def _supplied(collected: Sequence[Collected]) -> StepGroups:
    dropped = Counter[str]()
    for found in collected:
        dropped.update(found.dropped)
    metrics = {f"dropped_{reason}": float(count) for reason, count in dropped.items()}
    groups = [group for found in collected for group in found.groups()]
    return StepGroups(groups=groups, metrics=metrics, dropped=dropped.total())
