"""Fork credit: a call's value is the reward of its run minus the mean reward of forks with another answer to that call.

    A_t = R - mean over forks at t of R(fork)

A fork repeats the recorded run up to call t, gets another answer there, drawn from the same policy, and continues from
it. The mean over the forks estimates V(s_t), the value before the call, and R estimates the value after it, so A_t
estimates the advantage of the recorded answer. Compare VinePPO (Kazemnejad et al. 2024, arXiv 2410.01679), which draws
whole continuations at every step.

Deviations from it, which save model calls:
- Forks are coupled with the run: later calls whose request stays the same get their recorded answers. These were
  drawn for the same request, so each fork is a fair sample. Its difference from the run has less noise (common random
  numbers), and is exactly 0 if no later request depends on the answer.
- Answers are shared: all calls of a task with exactly the same request are alternatives to each other (`forking`). A
  sibling with the same calls up to that point is itself a fork, which need not be run.
- R is the reward of the one run, not a mean over continuations of it, because coupled forks are compared with this run.

The budget counts calls that a model answers. Forks without such calls are limited by ``forks`` and ``max_replays``.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Annotated

import msgspec

from agl.contracts import REPLAY_VERSION, ForkPlan, ReplayFn, is_diverged
from agl.errors import ConfigError
from agl.schemas import CallCredit, Episode, Reward
from agl_rewards.credit.episodes import by_group, group_of, live_calls, return_of
from agl_rewards.credit.forking import ForkChoice, Point

NAME = "fork"
Count = Annotated[int, msgspec.Meta(ge=1)]

SHARE = 0.5
"""Default budget: model calls that forks make, as a fraction of the model calls of the training rollouts."""

ROUNDS = 3
"""Largest number of rounds of forks in a step; model calls that one round saved are available to the next."""


class ForkCredit:
    """Credit by forks; see the module.

    The value of a call is its advantage, which no estimator compares again. A call without a fork gets the return minus
    the mean return of the task's other rollouts, or 0 if there are none. In steps that ``every`` skips, each call gets
    its return, compared with the same role in the other rollouts of the task.

    Args:
        calls_per_rollout: The forks' model calls per training rollout, on average over a step; by default half as many
            as a training rollout makes, so that the step makes 1.5 times its calls. The new calls of other agents after
            a fork are estimated from the recordings; if the forks make more calls than that, no further ones start.
        forks: The most forks of one call with answers from siblings; such a fork needs no new answer at the call.
        every: Fork only in every n-th step, beginning with the first.
        max_replays: The most forks that run per step.
        failed: The worth of a fork that fails on its own or gets no reward; diverged forks are ignored.
    """

    def __init__(
        self,
        *,
        calls_per_rollout: Annotated[float, msgspec.Meta(ge=0)] | None = None,
        forks: Count = 8,
        every: Count = 1,
        max_replays: Count = 1024,
        failed: float = 0.0,
    ) -> None:
        self._calls, self._forks, self._every = calls_per_rollout, forks, every
        self._max_replays, self._failed = max_replays, failed

    async def prepare(self, episodes: Sequence[Episode], *, step: int, replay: ReplayFn) -> list[Episode]:
        """Run forks, and attach the advantages of an episode's calls as the reward ``fork``, by span id.

        Returns the episodes in order.

        Raises:
            ConfigError: Every fork of the step diverged, or an episode that trains has no reward.
        """
        if (step - 1) % self._every:  # steps count from 1; the first is always forked
            return list(episodes)
        returns = {each.rollout.rollout_id: return_of(each) for each in episodes if live_calls(each)}
        choice = ForkChoice(episodes, forks=self._forks)
        runs = _Runs(replay, limit=self._max_replays, budget=self._budget(episodes))
        await _run_stand_ins(choice, runs)
        for _ in range(ROUNDS):
            drawn = choice.drawn(runs.calls_left)
            if not drawn:
                break
            await _run_drawn(choice, runs, drawn)
            await _run_stand_ins(choice, runs)
        runs.check()
        advantages = {point.span_id: self._advantage(point, choice, runs, returns) for point in choice.points}
        others = _means_of_others(episodes, returns)
        return [_attached(episode, advantages, others) for episode in episodes]

    def assign(self, group: Sequence[Episode]) -> list[list[CallCredit]]:
        """Return the credit of each call, in one list per episode and in order of time.

        Raises:
            ConfigError: An episode with calls to train on has no reward.
        """
        return [_assigned(episode) for episode in group]

    def _budget(self, episodes: Sequence[Episode]) -> int:
        if self._calls is not None:
            return math.floor(self._calls * len(episodes))
        return math.floor(SHARE * sum(len(episode.transitions) for episode in episodes))

    def _advantage(self, point: Point, choice: ForkChoice, runs: "_Runs", returns: Mapping[str, float]) -> float | None:
        """Return the advantage of the answer at ``point``; ``None`` if no run with another answer has a reward."""
        found: list[tuple[float, int]] = []
        found += [(returns[name], 1) for name in choice.finished_forks(point) if name in returns]
        for plan, count in [*choice.stand_ins(point), *((plan, 1) for plan in runs.drawn.get(point.span_id, ()))]:
            reward = runs.reward(plan, failed=self._failed)
            if reward is not None:
                found.append((reward, count))
        equal = choice.equal(point) + runs.equal.get(point.span_id, 0)
        if not found:
            return 0.0 if equal and not choice.is_contested(point) else None
        known = sum(count for _, count in found)
        forked = math.fsum(reward * count for reward, count in found) / known
        # A sample with the same answer would have been this very run: its difference is 0, and nothing has to run.
        return (returns[point.rollout_id] - forked) * known / (known + equal)


class _Runs:
    """Runs forks up to a limit, and holds the resulting episodes."""

    def __init__(self, replay: ReplayFn, *, limit: int, budget: int) -> None:
        self._replay, self._left, self.calls_left = replay, limit, budget
        self._episodes: dict[ForkPlan, Episode] = {}
        self.drawn: dict[str, list[ForkPlan]] = {}
        self.equal: dict[str, int] = {}

    async def run(self, plans: Iterable[ForkPlan]) -> None:
        """Run the plans that have not run before, until the limit is reached."""
        new = [plan for plan in dict.fromkeys(plans) if plan not in self._episodes][: max(0, self._left)]
        if not new:
            return
        self._left -= len(new)
        found = dict(zip(new, await self._replay(new), strict=True))
        self._episodes |= found
        self.calls_left -= sum(
            not call.model_version.startswith(REPLAY_VERSION)
            for episode in found.values()
            for call in episode.transitions
        )

    def get(self, plan: ForkPlan) -> Episode | None:
        """Return the episode of a fork; ``None`` if it did not run or diverged."""
        episode = self._episodes.get(plan)
        return None if episode is None or is_diverged(episode) else episode

    def reward(self, plan: ForkPlan, *, failed: float) -> float | None:
        """Return a fork's reward: ``failed`` if it failed or has none, ``None`` if it did not run or diverged."""
        episode = self.get(plan)
        if episode is None:
            return None
        return failed if episode.rollout.status != "succeeded" or episode.reward is None else episode.reward

    def check(self) -> None:
        """Raise :class:`ConfigError` if all forks diverged, which shows that the agent does not repeat its requests."""
        if self._episodes and all(map(is_diverged, self._episodes.values())):
            first = next(iter(self._episodes.values()))
            error = first.attempt.error.message if first.attempt and first.attempt.error else ""
            raise ConfigError(
                f"all {len(self._episodes)} forks of this step diverged from their recorded runs, so the credit "
                f"{NAME!r} has nothing to compare with. The first: {error}. Take from the requests what is another in "
                "each run, such as times, ids and the results of tools, or use a credit without replays"
            )


async def _run_stand_ins(choice: ForkChoice, runs: _Runs) -> None:
    """Run the forks that reuse siblings' answers, one per call in turn, until the budget of model calls is exceeded."""
    waiting = [choice.stand_ins(point) for point in choice.points]
    for turn in range(max(map(len, waiting), default=0)):
        if runs.calls_left < 0:
            return
        await runs.run(plans[turn][0] for plans in waiting if turn < len(plans))


async def _run_drawn(choice: ForkChoice, runs: _Runs, drawn: Sequence[tuple[ForkPlan, Point]]) -> None:
    await runs.run(plan for plan, _ in drawn)
    for plan, point in drawn:
        fork = runs.get(plan)
        if fork is None:
            continue
        if choice.add_drawn(point, fork):
            runs.drawn.setdefault(point.span_id, []).append(plan)
        else:
            runs.equal[point.span_id] = runs.equal.get(point.span_id, 0) + 1


def _means_of_others(episodes: Sequence[Episode], returns: Mapping[str, float]) -> dict[str, float]:
    """Return each rollout's return minus the mean of the task's other rollouts, by rollout id; 0 without others."""
    found: dict[str, float] = {}
    for group in by_group(episodes).values():
        own = {name: returns[name] for each in group if (name := each.rollout.rollout_id) in returns}
        for name, value in own.items():
            others = [other for key, other in own.items() if key != name]
            found[name] = value - fmean(others) if others else 0.0
    return found


def _attached(episode: Episode, advantages: Mapping[str, float | None], others: Mapping[str, float]) -> Episode:
    values: dict[str, float | None] = {}
    for call in live_calls(episode):
        known = advantages[call.span_id]
        values[call.span_id] = others[episode.rollout.rollout_id] if known is None else known
    if not values:
        return episode
    reward = Reward(value=None, name=NAME, dimensions=values, source="hook")
    return msgspec.structs.replace(episode, rewards=(*episode.rewards, reward))


def _assigned(episode: Episode) -> list[CallCredit]:
    calls = live_calls(episode)
    if not calls:
        return []
    known, value = _read(episode), return_of(episode)
    return [
        CallCredit(
            span_id=call.span_id,
            value=value if known is None else known[call.span_id],
            baseline=f"{group_of(episode)}/{call.agent}",
            is_advantage=known is not None,
        )
        for call in calls
    ]


def _read(episode: Episode) -> Mapping[str, float] | None:
    """Return the advantages that :meth:`ForkCredit.prepare` attached; ``None`` if there are none."""
    # Only the hook's own reward counts: an agent could report one of the same name.
    for reward in reversed(episode.rewards):
        if reward.name == NAME and reward.source == "hook" and reward.value is None:
            return {span_id: value for span_id, value in reward.dimensions.items() if value is not None}
    return None
