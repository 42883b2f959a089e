"""Trains on tasks that an agent writes during the run: a proposer mints tasks, and solvers try each of them.

One step, with the group size G:

    1. run the agent on training tasks, G times each; here it is the proposer: ``agl.emit_object(task, name="task")``
    2. leave out rollouts that failed or emitted no task, and tasks of the validation set
    3. run the agent on every new task, G times; here it is the solver
    4. reward each proposal with 1 - 2 |p - 0.5|, where p is the mean reward of its solvers, and 0 for no task
    5. publish the new tasks as the next version of the tuned resource, a list

The reward is highest for tasks that half of the solvers master, as for the proposer of Absolute Zero (Zhao et al. 2025,
arXiv 2505.03335, section 3.1), which gets 1 - p and 0 for p = 0. Here it is symmetric, because GRPO learns from a task
in proportion to p (1 - p), and 1 - p would favour tasks that hardly anyone masters.

This algorithm updates neither agent. Others do so with ``source = "mint"``: one that tunes the solver's policy, and one
that tunes the proposer's. The agent itself checks what it proposes, and emits nothing if the check fails. It does not
raise then: an experiment drops failed rollouts, so the proposer would not learn from the 0.
"""

from __future__ import annotations

import hashlib
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple, cast

from msgspec.structs import replace

from agl import semconv
from agl.contracts import RolloutQuery, StepReport
from agl.errors import ConfigError, RunError
from agl.hints import count_of
from agl.schemas import JsonResource, Reward
from agl.stores import read_recordings
from agl.tracing import make_reward_span
from agl_objectives.tasks import by_task, canonical, draw_places

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agl.contracts import AlgorithmContext, Collected, Recording
    from agl.schemas import Episode, Json

__all__ = ["Mint"]


class _Proposal(NamedTuple):
    recording: Recording
    task: Json  # None for no task


class Mint:
    """Mints tasks and runs solvers on them, for other algorithms to learn from.

    Args:
        budget: The most rollouts of the proposer; the last step ends before it would be exceeded.
        batch_size: Training tasks that a step gives to the proposer.
        group_size: Proposals for each of these tasks, and solvers of each new task.
    """

    def __init__(self, *, budget: int, batch_size: int = 1, group_size: int = 8) -> None:
        if budget < batch_size * group_size or min(batch_size, group_size) < 1:
            raise ConfigError(
                f"mint got budget = {budget}, batch_size = {batch_size} and group_size = {group_size}; a step takes "
                "batch_size x group_size proposals, and the budget must allow one step"
            )
        self._batch_size, self._group_size = batch_size, group_size
        self._steps, self._step = budget // (batch_size * group_size), 0

    async def setup(self, context: AlgorithmContext) -> None:
        """Take the context; raises :class:`ConfigError` if there is not one resource, or too few training tasks."""
        if len(context.tunes) != 1 or len(context.train) < self._batch_size:
            raise ConfigError(
                f"mint writes its tasks to one resource and takes {self._batch_size} training tasks a step; it got "
                f"{context.tunes} and {len(context.train)} tasks"
            )
        self._context = context
        self._held = {canonical(task) for task in context.val}

    async def step(self) -> StepReport:
        """Mint tasks, let solvers try them, and reward the proposals."""
        context, step = self._context, self._step + 1
        given = [context.train[place] for place in draw_places(context, step=step, count=self._batch_size)]
        written = await context.collect(given, step=step, n=self._group_size, key="propose", keeps_all=True)
        if all(one.rollout.status != "succeeded" for one in written.episodes):
            raise RunError(_no_proposal(written.episodes, step=step))
        proposals = await self._proposals(written)
        tasks = list({canonical(one.task): one.task for one in proposals if one.task is not None}.values())
        rates = await self._rates(tasks, step=step)
        rewards = [1 - 2 * abs(rates[canonical(one.task)] - 0.5) if one.task is not None else 0.0 for one in proposals]
        await self._reward(proposals, rewards)
        (name,) = context.tunes
        version = await context.publish(name, JsonResource(value=tasks), step=step)
        self._step, is_over = step, step >= self._steps
        metrics = {"minted": float(len(tasks)), "no_task": float(sum(one.task is None for one in proposals))}
        if rates:
            metrics |= {"solve_rate": fmean(rates.values()), "proposal_reward": fmean(rewards)}
        return StepReport(
            step=step,
            is_finished=is_over,
            stop_reason="the budget is spent" if is_over else "",
            metrics=metrics,
            published=(f"{name}@{version.version}",),
        )

    async def _proposals(self, written: Collected) -> list[_Proposal]:
        ids = tuple(episode.rollout.rollout_id for episode in written.episodes)
        read = read_recordings(self._context.store, RolloutQuery(ids=ids), spans="deciding")
        return [_Proposal(recording, self._task_of(recording)) async for recording in read]

    def _task_of(self, recording: Recording) -> Json:
        """Return the task that the agent emitted last; ``None`` without one that may train."""
        emitted = [span.attributes.get(semconv.OBJECT) for span in recording.spans if span.name == "object task"]
        is_task = recording.rollout.status == "succeeded" and emitted and canonical(emitted[-1]) not in self._held
        return emitted[-1] if is_task else None

    async def _rates(self, tasks: Sequence[Json], *, step: int) -> Mapping[str, float]:
        """Return the mean reward of the solvers by task; a failed solver counts as 0.

        Raises:
            ConfigError: A reward is not between 0 and 1.
        """
        if not tasks:
            return {}
        solved = await self._context.collect(tasks, step=step, n=self._group_size, key="solve", keeps_all=True)
        if wrong := next((one for one in solved.episodes if not 0 <= (one.reward or 0.0) <= 1), None):
            names = ", ".join(each.name or "(no name)" for each in wrong.rewards)
            raise ConfigError(
                f"mint needs rewards of solvers from 0 to 1, and {wrong.rollout.rollout_id} got {wrong.reward:g} "
                f"(its rewards: {names}); scale the reward"
            )
        groups = by_task(solved.episodes)
        return {task: fmean(one.reward or 0.0 for one in episodes) for task, episodes in groups.items()}

    async def _reward(self, proposals: Sequence[_Proposal], rewards: Sequence[float]) -> None:
        """Store the rewards of the proposals as late rewards; a repeated step stores the same ones."""
        spans = [
            replace(
                make_reward_span(
                    one.recording.rollout.rollout_id,
                    one.recording.rollout.attempt_id or "",
                    Reward(value=reward, source="evaluator"),
                ),
                span_id=hashlib.blake2b(f"{one.recording.rollout.rollout_id}/mint".encode(), digest_size=8).hexdigest(),
            )
            for one, reward in zip(proposals, rewards, strict=True)
        ]
        await self._context.store.append_spans(spans)

    def state(self) -> Mapping[str, Json]:
        """Return the number of steps."""
        return {"step": self._step}

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue after the steps of ``state``."""
        self._step = cast("int", state["step"])

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""


def _no_proposal(episodes: Sequence[Episode], *, step: int) -> str:
    first = episodes[0]
    error = first.attempt.error if first.attempt else None
    return (
        f"none of the {count_of(len(episodes), 'proposal')} of step {step} succeeded; the first failed with "
        f"{error.message if error else first.rollout.status!r}; look at it with agl show {first.rollout.rollout_id}"
    )
