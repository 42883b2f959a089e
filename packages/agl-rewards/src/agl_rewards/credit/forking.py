"""Chooses the forks of a step: at which calls, with which answers, and within how many model calls.

The *state* of a call is its agent and the exact prompt, as token ids. All calls of a task in the same state are samples
of the policy in that state, so each of their answers is an alternative to the others. This gives three kinds of forks,
cheapest first:

- A sibling that is equal up to the call and then has another answer is a fork already, and nothing has to run.
- A sibling's answer in the same state replaces the call's own. Later calls whose request stays the same keep their
  recorded answers, so no model is asked if no later request depends on the answer. If one does, this kind is not used,
  because it would ask the model.
- The model gives a new answer, which is then an alternative for all calls in that state.

The budget of model calls is spent on the last kind. It goes to calls for which a further sample tells most: those whose
answers differ, that have few samples so far, and after which few calls must be made anew.
"""

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agl.contracts import REPLAY_VERSION, ForkPlan
from agl.schemas import Episode, Transition, identity_ids, unpack_floats
from agl_rewards.credit.episodes import group_of

LEAST_SPREAD = 0.01
"""A state is not forked if a second answer would differ with less than this probability: forks would equal the run."""

State = tuple[str, str, bytes]
"""The state of a call: the task, the agent and the prompt's token ids, with the digests of its pictures.

For a call without token ids, it is the call's span id, so that the call is in a state of its own.
"""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """An answer that the policy sampled in a state, in a run or in a fork.

    Attributes:
        rollout_id: The rollout with the answer, which may be a fork.
        span_id: The span of the call.
        answer: The answer's token ids.
        later: The states of the rollout's calls after this one, with their counts.
    """

    rollout_id: str
    span_id: str
    answer: bytes
    later: Counter[State]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A training call at which its rollout can fork.

    Attributes:
        rollout_id: The rollout of the call.
        span_id: The span of the call.
        state: The state of the call.
        answer: The token ids of the recorded answer.
        before: The states and answers of the calls before this one.
        later: The states of the calls after this one, with their counts.
        spread: Estimated chance that a second answer in this state differs, from the recorded answer's probability.
    """

    rollout_id: str
    span_id: str
    state: State
    answer: bytes
    before: tuple[tuple[State, bytes], ...]
    later: Counter[State]
    spread: float

    def calls_after(self, sample: Sample) -> int:
        """Return the number of later calls that a model must answer anew if ``sample`` replaces the recorded answer.

        These are the later calls in the sample's rollout whose states do not occur after this point.
        """
        return (sample.later - self.later).total()


def state_of(episode: Episode, call: Transition) -> State:
    """Return the state of a call."""
    if not call.prompt_ids:
        return "", call.span_id, b""
    return group_of(episode), call.agent, identity_ids(call.prompt_ids, call.media)


def samples_of(episode: Episode, task: Episode) -> list[Sample]:
    """Return all answers of an episode as samples; their states are those of ``task``, an episode of the same task."""
    states = [state_of(task, call) for call in episode.transitions]
    return [
        Sample(
            rollout_id=episode.rollout.rollout_id,
            span_id=call.span_id,
            answer=call.response_ids,
            later=Counter(states[position + 1 :]),
        )
        for position, call in enumerate(episode.transitions)
    ]


def points_of(episode: Episode) -> list[Point]:
    """Return the training calls of an episode, in order of time."""
    calls = episode.transitions
    states = [state_of(episode, call) for call in calls]
    return [
        Point(
            rollout_id=episode.rollout.rollout_id,
            span_id=call.span_id,
            state=states[position],
            answer=call.response_ids,
            before=tuple((states[each], calls[each].response_ids) for each in range(position)),
            later=Counter(states[position + 1 :]),
            spread=_spread(call),
        )
        for position, call in enumerate(calls)
        if not call.reject
    ]


def _spread(call: Transition) -> float:
    # 1 - p of the answer drawn, whose mean over draws is the chance that two draws differ; 1 without log-probabilities.
    return -math.expm1(math.fsum(unpack_floats(call.logprobs))) if call.logprobs else 1.0


class ForkChoice:
    """Holds the samples of a step's episodes, and chooses the forks to run.

    Args:
        episodes: The step's episodes.
        forks: The most forks of one call with answers that siblings gave.
    """

    def __init__(self, episodes: Sequence[Episode], *, forks: int) -> None:
        self._forks = forks
        self._tasks = {episode.rollout.rollout_id: episode for episode in episodes}
        self._by_state: dict[State, list[Sample]] = {}
        self.points = [point for episode in episodes for point in points_of(episode)]
        self._at: dict[State, list[Point]] = {}
        for point in self.points:
            self._at.setdefault(point.state, []).append(point)
        self._prefixes = {(point.rollout_id, point.span_id): point.before for point in self.points}
        self._drawn: dict[str, list[Sample]] = {}
        for episode in episodes:
            for call, sample in zip(episode.transitions, samples_of(episode, episode), strict=True):
                self._by_state.setdefault(state_of(episode, call), []).append(sample)
        # Counted by plan, not by answer: a fork whose call failed gives no answer, but its sample number is used.
        self._taken: Counter[str] = Counter()
        self._counts = Counter({state: len(samples) for state, samples in self._by_state.items()})

    def add_drawn(self, point: Point, fork: Episode) -> bool:
        """Add the model's new answer in ``fork`` to the samples of the point's state; return true if it differs.

        It is compared with the recorded answer. A fork without a new answer, or without token ids, counts as different.
        """
        task = self._tasks[point.rollout_id]
        for call, sample in zip(fork.transitions, samples_of(fork, task), strict=True):
            if state_of(task, call) == point.state and not call.model_version.startswith(REPLAY_VERSION):
                self._by_state[point.state].append(sample)
                self._drawn.setdefault(point.span_id, []).append(sample)
                return sample.answer != point.answer
        return True

    def others(self, point: Point) -> list[Sample]:
        """Return the samples of the point's state, except the recorded answer and answers of forks at this point."""
        own = {point.span_id, *(sample.span_id for sample in self._drawn.get(point.span_id, ()))}
        return [sample for sample in self._by_state[point.state] if sample.span_id not in own]

    def equal(self, point: Point) -> int:
        """Return the number of other samples of the point's state whose answer equals the recorded answer."""
        return sum(sample.answer == point.answer for sample in self.others(point))

    def is_contested(self, point: Point) -> bool:
        """Return true if another sample of the point's state has a different answer."""
        return any(sample.answer != point.answer for sample in self.others(point))

    def finished_forks(self, point: Point) -> list[str]:
        """Return the ids of siblings that are forks of a call already: equal up to it, and with another answer there.

        Siblings whose answer can be used in a fork without model calls are left out, because that fork has less noise.
        """
        return [
            sample.rollout_id
            for sample in self.others(point)
            if sample.answer != point.answer
            and point.calls_after(sample) > 0
            and self._prefixes.get((sample.rollout_id, sample.span_id)) == point.before
        ]

    def stand_ins(self, point: Point) -> list[tuple[ForkPlan, int]]:
        """Return the forks that reuse a sibling's answer without any model call, each with its number of samples."""
        found: dict[bytes, tuple[ForkPlan, int]] = {}
        for sample in self.others(point):
            if sample.answer == point.answer or point.calls_after(sample) > 0:
                continue
            plan, count = found.get(sample.answer, (self._plan(point, sample), 0))
            found[sample.answer] = plan, count + 1
        return list(found.values())[: self._forks]

    def _plan(self, point: Point, sample: Sample) -> ForkPlan:
        return ForkPlan(
            rollout_id=point.rollout_id,
            span_id=point.span_id,
            answer_rollout=sample.rollout_id,
            answer_span=sample.span_id,
            is_coupled=True,
        )

    def drawn(self, budget: int) -> list[tuple[ForkPlan, Point]]:
        """Return new forks at which a model answers, for which ``budget`` model calls should suffice.

        Each fork is placed where it gains most for its cost: one more sample reduces the variance of a mean of m
        samples by s^2 / (m (m + 1)), for every call in the state. A plan is never returned twice, even by later calls.
        """
        costs = {state: [self._cost(point) for point in points] for state, points in self._at.items()}
        waiting = [(-self._gain(state, min(costs[state])), order, state) for order, state in enumerate(costs)]
        heapq.heapify(waiting)
        found: list[tuple[ForkPlan, Point]] = []
        while waiting:
            gain, order, state = heapq.heappop(waiting)
            cost = min(costs[state])
            if not gain or cost > budget:
                continue
            cheap = [point for point, own in zip(self._at[state], costs[state], strict=True) if own == cost]
            point = min(cheap, key=lambda each: self._taken[each.span_id])
            sample = self._taken[point.span_id]
            plan = ForkPlan(rollout_id=point.rollout_id, span_id=point.span_id, is_coupled=True, sample=sample)
            found.append((plan, point))
            self._taken[point.span_id] += 1
            self._counts[state] += 1
            budget -= cost
            heapq.heappush(waiting, (-self._gain(state, cost), order, state))
        return found

    def _gain(self, state: State, cost: int) -> float:
        count = self._counts[state]
        spread = math.fsum(point.spread for point in self._at[state])
        return 0.0 if spread < LEAST_SPREAD * len(self._at[state]) else spread / (count * (count + 1) * cost)

    def _cost(self, point: Point) -> int:
        """Return the expected model calls of a fork: the new answer, and later calls whose requests it changes."""
        others = [sample for sample in self._by_state[point.state] if sample.answer != point.answer]
        if not others:
            return 1 + point.later.total()  # nothing shows that they stay the same
        return 1 + math.ceil(math.fsum(point.calls_after(sample) for sample in others) / len(others))
