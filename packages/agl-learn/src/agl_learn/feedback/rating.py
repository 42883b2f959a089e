"""Combines the signals of a conversation into its reward.

Ratings by people count alone. Without one, the reward is the weighted mean of the other signals that have one.
"""

import logging
from collections.abc import Iterable, Mapping

import msgspec

from agl.contracts import RewardEmitter
from agl.episodes import ScoreOptions, score
from agl.errors import AglError, ConfigError
from agl.hints import did_you_mean
from agl.schemas import Reward, Rollout, Span
from agl.tracing import make_reward_span
from agl_learn.feedback.evidence import Evidence
from agl_learn.feedback.signals import BUILT_IN, Found, recorded, recorded_id, scaled
from agl_run import SignalSettings
from agl_run.engine import rewards_of

_log = logging.getLogger(__name__)

EXPLICIT = "thumbs"
"""The signal of ratings by people."""

_SAID = 4_000
"""The most characters of what was said; the latest ones are kept."""


class Feedback:
    """Rates conversations by signals.

    Args:
        signals: The signals, by name or with settings.
        emitters: The rewards of the experiment by their ``use``, as :func:`agl_run.engine.build_rewards` builds them.

    Raises:
        ConfigError: A signal is unknown, or has a setting that does nothing.
    """

    def __init__(
        self, signals: Iterable[str | SignalSettings], emitters: Mapping[str, RewardEmitter] | None = None
    ) -> None:
        self._emitters = emitters or {}
        given = [SignalSettings(use=each) if isinstance(each, str) else each for each in signals]
        self._signals = {each.use: _checked(each, self._emitters) for each in given}

    def __contains__(self, name: str) -> bool:
        """Return true if the signal ``name`` counts."""
        return name in self._signals

    def read(self, evidence: Evidence) -> dict[str, Found]:
        """Return the rewards of the signals that need no call, by the signal's name."""
        rewards = {use: BUILT_IN.get(use, recorded)(evidence, each) for use, each in self._signals.items()}
        return {use: found for use, found in rewards.items() if found is not None}

    async def judge(self, rollout: Rollout, spans: Iterable[Span], found: dict[str, Found]) -> list[Span]:
        """Call the experiment's rewards that are neither recorded nor in ``found``, and add their results there.

        A reward that fails is left out with a warning. Its words are left out too, because optimisers read what is
        recorded, and a candidate that knows its judge's words would please the judge instead of the users.

        Returns:
            The spans that record the results.
        """
        made: list[Span] = []
        for use in [use for use in self._signals if use in self._emitters and use not in found]:
            try:
                rewards = await rewards_of(use, self._emitters[use], rollout, list(spans))
            except Exception as error:  # noqa: BLE001  # a reward may raise anything
                reason = error if isinstance(error, AglError) else f"{type(error).__name__}: {error}"
                _log.warning("the reward %r of conversation %s is left out: %s", use, rollout.rollout_id, reason)
                continue
            value = score(rewards, options=ScoreOptions()).value
            if value is not None:
                found[use] = Found(scaled(value, self._signals[use]))
                made.append(record(rollout, Reward(value=value, name=use)))
        return made

    def reward(self, found: Mapping[str, Found]) -> float | None:
        """Combine the rewards of the signals; ``None`` if there is no reward."""
        if EXPLICIT in found:
            return found[EXPLICIT].reward
        weights = {use: self._signals[use].weight for use in found}
        total = sum(weights[use] * one.reward for use, one in found.items())
        return total / sum(weights.values()) if found else None


def said_of(evidence: Evidence, found: Mapping[str, Found]) -> str:
    """Return what the user replied and reported, and what the signals noticed, one per line."""
    lines = [*evidence.reactions, *(one.words for one in found.values() if one.words)]
    return "\n".join(lines)[-_SAID:]


def record(rollout: Rollout, reward: Reward) -> Span:
    """Make the span that records a reward of a conversation.

    Its source is ``hook``: a person's later rating then takes its place wherever rewards are read.
    """
    span = make_reward_span(
        rollout.rollout_id, rollout.attempt_id or "", msgspec.structs.replace(reward, source="hook")
    )
    return msgspec.structs.replace(span, span_id=recorded_id(rollout.rollout_id, reward.name))


def _checked(signal: SignalSettings, emitters: Mapping[str, RewardEmitter]) -> SignalSettings:
    """Return the signal; raises :class:`ConfigError` if it is unknown, or has a setting that does nothing."""
    use, (low, high) = signal.use, signal.range
    known = [*BUILT_IN, *emitters]
    if use not in known:
        others = f"choose from {', '.join(known)}, or name the use of a [[reward]] of the file"
        raise ConfigError(f"feedback has no signal {use!r}; {did_you_mean(use, known, otherwise=others)}")
    if signal.phrases and use != "correction":
        raise ConfigError(
            f'the signal {use!r} reads no phrases; give them to {{ use = "correction", phrases = [...] }}'
        )
    if low >= high:
        raise ConfigError(f"the signal {use!r} has the range [{low:g}, {high:g}]; write the lower value first")
    return signal
