"""Collects the groups of an on-policy step, and replaces groups that teach nothing by groups of further tasks.

A group is silent if the credit of its calls does not differ, for example because every rollout succeeded or none did. A
silent group has no gradient. Dynamic sampling (DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2) leaves silent
groups out of the update and runs further tasks in their place, until the step has its number of groups or has used up
its rounds:

    1. run the tasks of the step, `group_size` times each
    2. while groups are missing, at most `refill` times: run as many further tasks as groups are missing
    3. return the groups that differ; silent groups are recorded, counted and reported to `agl why`

Deviations from the paper, and why:
- A round runs only as many tasks as are missing, not a whole batch, because rollouts of agents cost more than rounds.
- The number of rounds is limited. A step that has used them up trains on the groups that it has.
- If every group is silent, the step returns the groups of its first tasks. It then trains nothing, as without rounds,
  and its metrics count the groups as silent.
- Credit may differ between the calls of a rollout. Silence therefore depends on the distance of each call's credit from
  the mean of the group, and not only on the rewards of rollouts.
- An algorithm that does not learn from differences decides itself which groups are silent (`Silence`).

For estimators that compare with a greedy rollout (ReMax, Li et al. 2023, arXiv 2310.10505) every task of the step runs
once more, at temperature 0. Greedy rollouts train nothing. If the greedy rollout of a task has no reward, the task's
group trains nothing either.

An algorithm with a `source` collects nothing. Its step gets the groups that the sources have collected since its last
step, without those in which only agents or policies that it does not train made calls.

After a restart no rollout is run twice. The tasks of a round follow from the seed and the step (`tasks`), and the ids
of the rollouts from their positions in the step, so a repeated step finds the rollouts that were already run.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from agl.contracts import Collected
from agl.errors import ConfigError, RunError
from agl_objectives.answers import SoftOverlong, rollout_shares, without_truncated
from agl_objectives.reports import mean_and_deviation
from agl_objectives.tasks import Curriculum, TaskDraws, by_task, canonical
from agl_objectives.uses import call_uses, rollout_uses

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from agl.contracts import AlgorithmContext, CallUse, Credit
    from agl.schemas import CallCredit, Episode, Json

__all__ = [
    "DROPPED",
    "GREEDY",
    "NO_BASELINE",
    "Baseline",
    "GroupSampler",
    "SampledGroups",
    "Silence",
    "baseline_of",
    "trained_tokens",
]

DROPPED = (
    "silent, dropped: the rollouts of its group do not differ, and the step took further tasks in its place (refill)"
)
"""Note of `agl why` on the calls of a group that was replaced."""

GREEDY = "not trained: its greedy answers are the baseline of its task"
"""Note of `agl why` on the calls of a greedy rollout."""

NO_BASELINE = "no baseline: the greedy rollout of its task has no reward"
"""Note of `agl why` on the calls of a group whose greedy rollout has no reward."""

TOLERANCE = 1e-6
"""A call's credit counts as equal to the mean of its group if it is closer to the mean than this."""

NO_PUNISHMENT = SoftOverlong()


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The results of a greedy rollout: the reward, and the mean credit of the calls by baseline key."""

    reward: float
    scores: Mapping[str, float] = field(default_factory=dict[str, float])

    def of(self, key: str) -> float:
        """Return the mean credit of the greedy calls with a baseline key; without such calls, the greedy reward."""
        return self.scores.get(key, self.reward)


def baseline_of(episode: Episode, *, credit: Credit) -> Baseline | None:
    """Return the baseline of a greedy rollout, `None` if it has no reward."""
    if episode.reward is None:
        return None
    values: dict[str, list[float]] = {}
    for call in credit.assign([episode])[0]:
        values.setdefault(call.baseline, []).append(call.value)
    return Baseline(reward=episode.reward, scores={key: sum(given) / len(given) for key, given in values.items()})


def trained_tokens(episodes: Sequence[Episode]) -> dict[str, int]:
    """Return the number of sampled tokens of every call in the episodes' rows, by span id."""
    parts = [part for episode in episodes for row in episode.rows for part in row.segments]
    return {part.span_id: part.stop - part.start for part in parts}


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """Defines the groups from which an algorithm learns nothing.

    Attributes:
        of: Returns true for a silent group; the result depends only on the rollouts.
        note: Shown by `agl why` for the calls of a silent group that was replaced.
    """

    of: Callable[[Sequence[Episode]], Awaitable[bool]]
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledGroups:
    """The groups of a step.

    Attributes:
        groups: The groups to train on.
        episodes: All collected rollouts, those of replaced groups included.
        dropped: Number of dropped rollouts, by reason; they are in no group.
        metrics: Numbers to log, with the dropped rollouts and the seconds of collecting. For a step with rounds they
            describe all of the step's rollouts.
        uses: The uses of calls that do not train, in replaced groups and greedy rollouts, by rollout id.
        baselines: The baseline of each group, in the order of `groups`; empty without greedy rollouts.
    """

    groups: list[list[Episode]]
    episodes: list[Episode]
    dropped: Counter[str]
    metrics: dict[str, float]
    uses: dict[str, tuple[CallUse, ...]] = field(default_factory=dict[str, "tuple[CallUse, ...]"])
    baselines: list[Baseline] = field(default_factory=list[Baseline])


def _is_of_others(group: Sequence[Episode]) -> bool:
    calls = [call for episode in group for call in episode.transitions]
    return bool(calls) and all(call.reject == "not_selected" for call in calls)


class GroupSampler:
    """Collects the groups of a run's steps. Call `begin` first.

    Args:
        algorithm: The algorithm's registered name, for messages.
        count: Groups per step.
        n: Rollouts per group.
        refill: Largest number of rounds in which silent groups are replaced; 0 trains on every group.
        curriculum: The tasks to prefer; see `tasks`.
        mask_truncated: Whether calls that were cut at a limit of tokens train nothing.
        overlong: The punishment of long answers, which also makes the calls of a group differ.
        silence: Defines silent groups; by default those whose calls do not differ.
        keeps_all: Whether failed rollouts and rollouts without a reward are kept.
        has_greedy: Whether every task also runs greedily, as the baseline of its group.
        compares_batch: Whether the estimator compares over the whole batch, so that equal rollouts of a group teach.
        max_age: With a source, how many versions of the tuned resources a rollout may be behind; -1 for no limit.

    Attributes:
        is_over: With a source, whether no more rollouts will come.

    Raises:
        ConfigError: A value is out of range, or has no effect with the others.
    """

    def __init__(
        self,
        algorithm: str,
        *,
        count: int,
        n: int,
        refill: int = 0,
        curriculum: Curriculum = "",
        mask_truncated: bool = False,
        overlong: SoftOverlong = NO_PUNISHMENT,
        silence: Silence | None = None,
        keeps_all: bool = False,
        has_greedy: bool = False,
        compares_batch: bool = False,
        max_age: int = -1,
    ) -> None:
        if refill < 0:
            raise ConfigError(f"{algorithm} got refill = {refill}; give the most rounds of a step, or 0 for none.")
        if refill and has_greedy:
            raise ConfigError(
                f"{algorithm} got refill = {refill}, which replaces groups whose rollouts do not differ, "
                "and an estimator that compares them with a greedy rollout. Remove refill, or use rloo."
            )
        if refill and n < 2 and silence is None:
            raise ConfigError(
                f"{algorithm} got refill = {refill} and groups of {n} rollout, which has nothing to differ from: every "
                "group would be replaced. Give at least 2 rollouts per task, or remove refill."
            )
        if refill and compares_batch:
            raise ConfigError(
                f"{algorithm} got refill = {refill}, which replaces groups whose rollouts do not differ, and an "
                "estimator that compares over the whole batch, where these teach as well. Remove refill, or use "
                "reinforce++-baseline."
            )
        self._count, self._n, self._refill = count, n, refill
        self._draws = TaskDraws(algorithm, curriculum=curriculum)
        self._mask_truncated, self._overlong = mask_truncated, overlong
        self._silence, self._keeps_all, self._has_greedy = silence, keeps_all, has_greedy
        self._algorithm, self._has_curriculum = algorithm, bool(curriculum)
        self._max_age, self._after = max_age, dict[str, int]()
        self.is_over = False

    def begin(self, context: AlgorithmContext) -> None:
        """Take the algorithm's context; raises ConfigError if a source would make settings useless."""
        self._context = context
        if not context.sources:
            self._draws.begin(context)
            return
        chosen = {"refill": self._refill, "curriculum": self._has_curriculum, "a greedy baseline": self._has_greedy}
        if useless := [name for name, value in chosen.items() if value]:
            raise ConfigError(
                f"{self._algorithm} learns from {list(context.sources)}, which chose its own tasks, so "
                f"{' and '.join(useless)} would be ignored; set that in the algorithm that collects, or remove the "
                "source."
            )

    async def collect(self, step: int) -> SampledGroups:
        """Return the groups of a step; raises RunError if no rollout of the first tasks is usable."""
        if self._context.sources:
            return await self._shared()
        started = time.perf_counter()
        places = self._draws.first(step, self._count)
        metrics = self._draws.metrics(places)
        if self._has_greedy:  # at the same time, because rollouts take long
            found, greedy = await asyncio.gather(self._run(step, places), self._greedy(step, places))
        else:
            found, greedy = await self._run(step, places), None
        sampled = SampledGroups(
            groups=found.groups(), episodes=list(found.episodes), dropped=Counter(found.dropped), metrics=metrics
        )
        if self._refill:
            sampled, places = await self._refilled(step, places, begun=sampled)
        if greedy is not None:
            sampled = self._compared(sampled, greedy)
        if self._has_curriculum:
            self._require_rewards(step, [e for e in sampled.episodes if e.rollout.status == "succeeded"])
        self._draws.note(sampled.episodes, places)
        # Rollouts that the experiment drops, because they failed or have no reward.
        sampled.metrics.update({f"dropped_{reason}": float(count) for reason, count in sampled.dropped.items()})
        sampled.metrics["collect_s"] = time.perf_counter() - started
        return sampled

    def _require_rewards(self, step: int, finished: Sequence[Episode]) -> None:
        """Raise ConfigError if there are finished rollouts and none of them has a reward."""
        if finished and all(episode.reward is None for episode in finished):
            raise ConfigError(
                f"{self._algorithm} has a curriculum, which chooses tasks by their rewards, and none of the "
                f"{len(finished)} finished rollouts of step {step} has one. Add a [[reward]], or remove curriculum."
            )

    def state(self) -> dict[str, Json]:
        """Return the state of the curriculum or the position in the sources as JSON; empty without both."""
        if self._after:
            return {"after": dict(self._after), "is_over": self.is_over}
        return self._draws.state()

    def restore(self, state: Mapping[str, Json]) -> None:
        """Restore the state of the curriculum, or the position in the sources."""
        if "after" in state:
            self._after = dict(state["after"])
        else:
            self._draws.restore(state)

    async def _shared(self) -> SampledGroups:
        """Return the groups that the sources have collected since the last step."""
        found = await self._context.recorded(after=self._after, max_age=None if self._max_age < 0 else self._max_age)
        self._after, self.is_over = dict(found.steps), found.is_over
        groups = [group for group in found.groups() if not _is_of_others(group)]
        return SampledGroups(
            groups=groups,
            episodes=[episode for group in groups for episode in group],
            dropped=Counter(found.dropped),
            metrics={f"dropped_{reason}": float(count) for reason, count in found.dropped.items()},
        )

    async def _refilled(
        self, step: int, places: Sequence[int], *, begun: SampledGroups
    ) -> tuple[SampledGroups, list[int]]:
        """Replace silent groups; returns the step's groups, and the indices of all tasks that the step has run."""
        wanted, taken = len(places), list(places)
        groups, dropped = list(begun.groups), Counter(begun.dropped)
        loud = [group for group in groups if not await self._is_silent(group)]
        rounds = 0
        while len(loud) < wanted and rounds < self._refill:
            further = self._draws.further(step, taken=taken, count=wanted - len(loud))
            if not further:  # the step has taken every task
                break
            # The key counts the further tasks of earlier rounds: the same tasks always have the same ids.
            found = await self._further(step, further, key=f"refill{len(taken) - wanted}")
            taken, rounds = taken + further, rounds + 1
            dropped.update(found.dropped)
            fresh = found.groups()
            groups += fresh
            loud += [group for group in fresh if not await self._is_silent(group)]
        kept = loud or begun.groups
        silent = [group for group in groups if not any(group is other for other in kept)]
        counts = {
            "groups": len(groups),
            "groups_silent": len(groups) - len(loud),
            "groups_dropped": len(silent),
            "groups_missing": wanted - len(loud),
            "rollouts_extra": (len(taken) - wanted) * self._n,
            "refill_rounds": rounds,
        }
        episodes = [episode for group in groups for episode in group]
        heard = {episode.rollout.rollout_id for group in loud for episode in group}
        sampled = SampledGroups(
            groups=kept,
            episodes=episodes,
            dropped=dropped,
            metrics={
                **begun.metrics,
                **_totals(episodes),
                **rollout_shares(episodes, dropped=dropped.total(), loud=heard),
                **{name: float(value) for name, value in counts.items()},
            },
            uses={rollout: calls for group in silent for rollout, calls in self._uses(group).items()},
        )
        return sampled, taken

    async def _run(self, step: int, places: Sequence[int], *, key: str = "") -> Collected:
        tasks = [self._context.train[place] for place in places]
        return await self._context.collect(tasks, step=step, n=self._n, key=key, keeps_all=self._keeps_all)

    async def _greedy(self, step: int, places: Sequence[int]) -> Collected:
        tasks = [self._context.train[place] for place in places]
        return await self._context.collect(tasks, step=step, mode="test", key="greedy", greedy=True)

    def _compared(self, sampled: SampledGroups, greedy: Collected) -> SampledGroups:
        """Return the groups whose greedy rollout has a reward, each with its baseline.

        A group with several tasks is split by task, because each task has its own greedy rollout.
        """
        known: dict[str, Baseline] = {}
        for episode in greedy.episodes:
            baseline = baseline_of(episode, credit=self._context.credit)
            if baseline is not None:
                known[canonical(episode.rollout.task)] = baseline
        found = [(part, known.get(task)) for group in sampled.groups for task, part in by_task(group).items()]
        lost = [episode for group, baseline in found if baseline is None for episode in group]
        uses = rollout_uses(greedy.episodes, {}, left_out=GREEDY) | rollout_uses(lost, {}, left_out=NO_BASELINE)
        rewards = [baseline.reward for baseline in known.values()]
        metrics = {
            "rollouts_greedy": float(len(greedy.episodes) + sum(greedy.dropped.values())),
            "groups_without_baseline": float(sum(baseline is None for _, baseline in found)),
        }
        if rewards:
            metrics["reward_greedy"] = sum(rewards) / len(rewards)
        return replace(
            sampled,
            groups=[group for group, baseline in found if baseline is not None],
            baselines=[baseline for _, baseline in found if baseline is not None],
            metrics=sampled.metrics | metrics,
            uses=sampled.uses | uses,
        )

    async def _further(self, step: int, places: Sequence[int], *, key: str) -> Collected:
        """Run further tasks; if none of their rollouts is usable, all count as dropped, and the step goes on."""
        try:
            return await self._run(step, places, key=key)
        except RunError:
            return Collected(dropped={"unusable": len(places) * self._n})

    def _credits(self, group: Sequence[Episode]) -> list[list[CallCredit]]:
        assigned = zip(group, self._context.credit.assign(group), strict=True)
        return [list(self._overlong.applied(episode, calls)) for episode, calls in assigned]

    async def _is_silent(self, group: Sequence[Episode]) -> bool:
        """Return true if a group is silent by the algorithm's own `silence` or, without one, by `is_equal`."""
        return self.is_equal(group) if self._silence is None else await self._silence.of(group)

    def is_equal(self, group: Sequence[Episode]) -> bool:
        """Return true if no trainable call of a group differs from the mean of the scores that it is compared with."""
        tokens = trained_tokens(group)
        scores: defaultdict[str, list[float]] = defaultdict(list)  # of the rollouts, by baseline key
        live: list[CallCredit] = []
        for episode, calls in zip(group, self._credits(group), strict=True):
            own: defaultdict[str, list[float]] = defaultdict(list)
            for call in calls:
                if not call.is_advantage:
                    own[call.baseline].append(call.value)
            for key, values in own.items():
                scores[key].append(sum(values) / len(values))
            spans = {call.span_id: 0.0 for call in calls if tokens.get(call.span_id)}
            spans = without_truncated(episode, spans) if self._mask_truncated else spans
            live += [call for call in calls if call.span_id in spans]
        return not any(_differs(call, scores[call.baseline]) for call in live)

    def _uses(self, group: Sequence[Episode]) -> dict[str, tuple[CallUse, ...]]:
        """Return the uses of the calls of a group that was replaced, by rollout id."""
        if self._silence is not None:
            return rollout_uses(group, {}, left_out=self._silence.note)
        credits = [{call.span_id: call.value for call in calls} for calls in self._credits(group)]
        return {
            episode.rollout.rollout_id: call_uses(episode, trained=(), credits=given, left_out=DROPPED)
            for episode, given in zip(group, credits, strict=True)
        }


def _differs(call: CallCredit, scores: Sequence[float]) -> bool:
    """Return true if a call's advantage is not 0; `scores` are those of the rollouts that the call is compared with."""
    if call.is_advantage:
        return abs(call.value) > TOLERANCE
    middle = sum(scores) / len(scores)
    # A single score equals the mean.
    return len(scores) > 1 and abs(call.value - middle) > TOLERANCE * max(1.0, abs(middle))


def _totals(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the metrics of all rollouts of a step, which replace those of the trained groups alone."""
    mean, deviation = mean_and_deviation([e.reward for e in episodes if e.reward is not None])
    return {"reward": mean, "reward_std": deviation, "rollouts": float(len(episodes))}
