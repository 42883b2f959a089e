"""Selects the recorded rewards that count, for the whole episode and for single calls.

A reward that came with an agent's own token has the source ``agent``, and counts only if that source is trusted. A
reward that was appended after the attempt was decided counts only if its source is outside the attempt: an evaluator,
a hook or a person. A missing reward stays ``None`` and is never turned into a number.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from agl._actors import Enclosing
from agl.episodes._timeline import Moment, Timeline
from agl.schemas import Graded, Record, Reward, Span

R = TypeVar("R", Graded, Reward)

# Rank of the sources: an evaluator is declared in the experiment and an environment comes with the
# task, so they precede hooks, people and agents.
_RANK = {"evaluator": 0, "environment": 1}
_OTHER = 2
# Late rewards from these sources count. One from the attempt's own environment or agent does not,
# because it may come from a worker that was declared lost.
_FROM_OUTSIDE = frozenset({"evaluator", "hook", "human"})


class ScoreOptions(Record, frozen=True, kw_only=True):
    """Selects the rewards that train.

    Attributes:
        key: Name of the reward, or of the dimension, to use as the episode's scalar; ``None`` to choose by rule.
        weights: Weights by the name of a reward or dimension; the scalar is the weighted sum. All must be present.
        trust_agent: Whether rewards with the source ``agent`` count.
    """

    key: str | None = None
    weights: dict[str, float] = {}
    trust_agent: bool = False


class Score(Record, frozen=True, kw_only=True):
    """An episode's scalar reward, and a text that gives its origin or the reason why it is missing."""

    value: float | None
    note: str


def episode_reward(
    spans: Sequence[Span],
    *,
    key: str | None = None,
    weights: Mapping[str, float] | None = None,
    trust_agent: bool = False,
) -> float | None:
    """The scalar reward of one attempt, by the rule of :func:`score`; ``None`` if no reward counts."""
    options = ScoreOptions(key=key, weights=dict(weights or {}), trust_agent=trust_agent)
    return score([span.reward for span in spans if span.reward and counts(span, options)], options=options).value


def counts(span: Span, options: ScoreOptions) -> bool:
    """True if a reward span counts: it is no gold, its source is trusted, and it is no late reward of its attempt."""
    reward = span.reward
    # An agent that grades itself can learn to grade instead of to work.
    if reward is None or reward.is_gold or (reward.source == "agent" and not options.trust_agent):
        return False
    return not span.is_late or reward.source in _FROM_OUTSIDE


def score(rewards: Sequence[Reward], *, options: ScoreOptions) -> Score:
    """Choose an episode's scalar from rewards in order of time; only rewards with scope ``rollout`` count.

    Among rewards of the same name, the one with the best source counts (evaluator, then environment, then all others),
    and among those of the same source the last one. Of the rewards that remain, the scalar is the one called ``key``,
    or the weighted sum. Without key and weights it is the unnamed reward of the best source, or the only reward of that
    source. If the best source has several named rewards, the scalar is ``None``.
    """
    named = by_name([reward for reward in rewards if reward.scope == "rollout"])
    if not named:
        return Score(value=None, note="no reward about the whole rollout was recorded")
    if options.key is not None:
        return _keyed(named, options.key)
    if options.weights:
        return _weighted(named, options.weights)
    best = min(_rank(reward.source) for reward in named.values())
    # A worse source never breaks a tie among the best one's rewards.
    choice = {name: reward for name, reward in named.items() if _rank(reward.source) == best}
    if len(choice) > 1 and "" not in choice:
        names = ", ".join(sorted(choice))
        # No guess: the sum, the mean and the first are three different objectives.
        return Score(value=None, note=f"several rewards were recorded ({names}); declare a key or weights for them")
    chosen = choice.get("") or next(iter(choice.values()))
    return Score(value=chosen.value, note=_shown_name(chosen, chosen.name))


def call_rewards(
    timeline: Timeline, calls: Sequence[Span], *, enclosing: Enclosing, options: ScoreOptions
) -> dict[str, float]:
    """Sum of the rewards about single calls, by the call's span id; of rewards with one name the last counts.

    ``calls`` are the candidates in order of time. A reward with scope ``turn`` and no span id belongs to the newest
    call before it. A reward about a span that is not a model call, such as a tool's, belongs to the newest call that
    the same agent began before the end of that span; if there is none, to the newest call of any agent.
    """
    finder = _CallFinder(timeline, calls, enclosing)
    found: dict[str, dict[str, float]] = {}
    for span in timeline.spans:
        reward = span.reward
        if reward is None or reward.scope == "rollout" or not counts(span, options):
            continue
        about = finder.call_of(span, reward)
        if about is None:
            continue
        named = found.setdefault(about, {})
        named.pop(reward.name, None)
        # None takes an earlier value of that name back.
        if reward.value is not None:
            named[reward.name] = reward.value
    return {span_id: sum(named.values()) for span_id, named in found.items() if named}


class _CallFinder:
    """Finds the call to which a reward belongs."""

    def __init__(self, timeline: Timeline, calls: Sequence[Span], enclosing: Enclosing) -> None:
        self._timeline = timeline
        self._enclosing = enclosing
        self._calls = calls
        self._call_ids = {span.span_id for span in calls}
        self._moments = [timeline.start(span) for span in calls]
        self._spans = {span.span_id: span for span in timeline.spans}
        self._agents: dict[str, list[int]] | None = None

    def call_of(self, span: Span, reward: Reward) -> str | None:
        # A reward with scope span but no span id is about the span in which it was reported.
        target = reward.span_id or (span.parent_id if reward.scope == "span" else None)
        if target is None:
            index = bisect_right(self._moments, self._timeline.start(span)) - 1
            return self._calls[index].span_id if index >= 0 else None
        if target in self._call_ids:
            return target
        about = self._spans.get(target)
        # An unknown span, or a call that is no candidate, such as a superseded one.
        if about is None or about.call is not None:
            return None
        return self._newest(self._timeline.end(about), self._enclosing.who(about).agent)

    def _newest(self, moment: Moment, agent: str) -> str | None:
        """The newest call of ``agent`` that began by ``moment``; without one, the newest call of any agent."""
        # Built on first use: most rewards are about the rollout or name their call.
        if self._agents is None:
            self._agents = {}
            for index, call in enumerate(self._calls):
                self._agents.setdefault(self._enclosing.who(call).agent, []).append(index)
        own = self._agents.get(agent, [])
        index = bisect_right(own, moment, key=self._moments.__getitem__) - 1
        if index >= 0:
            return self._calls[own[index]].span_id
        index = bisect_right(self._moments, moment) - 1
        return self._calls[index].span_id if index >= 0 else None


def by_name(rewards: Iterable[R]) -> dict[str, R]:
    """Select one reward per name: the last one of the best source. ``rewards`` are in order of time."""
    named: dict[str, R] = {}
    for reward in rewards:
        held = named.get(reward.name)
        if held is None or _rank(reward.source) <= _rank(held.source):
            # Taken out first, so that the dict stays in order of time.
            named.pop(reward.name, None)
            named[reward.name] = reward
    return named


def _rank(source: str) -> int:
    """The rank of a reward's source; 0 for the best source."""
    return _RANK.get(source, _OTHER)


def _keyed(named: Mapping[str, Reward], key: str) -> Score:
    found = _lookup(named, key)
    if found is None:
        names = ", ".join(repr(name) for name in sorted(named))
        return Score(value=None, note=f"no reward or dimension {key!r} was recorded; recorded: {names}")
    reward, value = found
    return Score(value=value, note=_shown_name(reward, key))


def _weighted(named: Mapping[str, Reward], weights: Mapping[str, float]) -> Score:
    total = 0.0
    for name, weight in weights.items():
        found = _lookup(named, name)
        if found is None or found[1] is None:
            return Score(value=None, note=f"the weighted reward {name!r} is missing")
        total += weight * found[1]
    names = ", ".join(weights)
    # Weights and rewards are finite, and their sum may still overflow.
    if not math.isfinite(total):
        return Score(value=None, note=f"the weighted sum of {names} is {total}")
    return Score(value=total, note=f"weighted sum of {names}")


def _lookup(named: Mapping[str, Reward], key: str) -> tuple[Reward, float | None] | None:
    """The reward called ``key``, or the best reward with a dimension ``key``; with the value of reward or dimension."""
    if key in named:
        return named[key], named[key].value
    holders = [reward for reward in named.values() if key in reward.dimensions]
    if not holders:
        return None
    best = min(holders, key=lambda reward: _rank(reward.source))
    return best, best.dimensions[key]


def _shown_name(reward: Reward, name: str) -> str:
    return f"reward {name!r} of the {reward.source}" if name else f"the {reward.source}'s reward"
