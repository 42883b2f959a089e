"""The built-in signals: functions that read a recorded conversation, and give a reward from 0 to 1.

    thumbs             what people reported about the conversation or about its answers
    scores             what evaluators, environments, hooks and batch jobs recorded
    repeated-question  0 if the user asks the same again, here or in the next conversation
    correction         0 if the user corrects an answer, 1 if the user replies without a correction
    abandoned          0 if the user leaves without replying to a question, or without the answer
    tool-errors        the share of tool calls that did not fail

A signal gives no reward where it has nothing to go by.
"""

import re
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

from agl import semconv
from agl.episodes import ScoreOptions, counts, score
from agl.schemas import Reward, Span
from agl_inspect.text import short
from agl_learn.feedback.evidence import Evidence
from agl_learn.feedback.words import has_phrase, is_same_question
from agl_run import SignalSettings

_NEAR = 5
"""With how many of the user's last questions a question is compared."""

_SHOWN = 300
"""How much of a text is quoted, in characters."""

CORRECTIONS = (
    *("I meant", "I said", "not what I", "did not ask", "you misunderstood", "wrong answer", "still not"),
    *("that is wrong", "this is wrong", "is not right", "is not true", "is not correct", "is incorrect"),
    *("does not work", "did not work", "not helpful"),
)
"""Phrases with which users correct an answer; short forms such as *that's* count as *that is*."""

_COURTESIES = ("anything else", "any other", "further", "help you", "that help", "helpful")
"""Phrases of a closing question that needs no reply."""

_ERROR = re.compile(r'\s*(?:[\[{(]?\s*"?(?:error|exception)\b|traceback \(most recent|failed\b)', re.IGNORECASE)


class Found(NamedTuple):
    """The reward that a signal gives, and its reason for people and optimisers."""

    reward: float
    words: str = ""


Signal = Callable[[Evidence, SignalSettings], Found | None]


def thumbs(evidence: Evidence, settings: SignalSettings) -> Found | None:
    """Return the mean of the ratings by people; of several about one subject, the newest counts."""
    newest: dict[tuple[Any, ...], Reward] = {}
    for span in evidence.spans:
        if (reward := span.reward) is not None and reward.source == "human":
            newest[reward.scope, reward.span_id, reward.name] = reward
    values = [reward.value for reward in newest.values() if reward.value is not None]
    if not values:
        return None
    words = [reward.feedback for reward in newest.values() if reward.feedback]
    return Found(sum(scaled(value, settings) for value in values) / len(values), "\n".join(words))


def scores(evidence: Evidence, settings: SignalSettings) -> Found | None:
    """Return the reward that others than people recorded, by the rule of :func:`agl.episodes.score`."""
    own = {recorded_id(evidence.rollout.rollout_id, span.reward.name) for span in evidence.spans if span.reward}
    rewards = [
        span.reward
        for span in evidence.spans
        if span.reward and span.reward.source != "human" and span.span_id not in own and counts(span, ScoreOptions())
    ]
    value = score(rewards, options=ScoreOptions()).value
    return None if value is None else Found(scaled(value, settings))


def repeated_question(evidence: Evidence, _settings: SignalSettings) -> Found | None:
    """Return 0 if the user asks a question again, also in other words, in this or the next conversation."""
    questions = [*evidence.questions, *([evidence.asked_next] if evidence.asked_next else [])]
    if not questions:
        return None
    for at, question in enumerate(questions):
        if any(is_same_question(question, earlier) for earlier in questions[max(0, at - _NEAR) : at]):
            return Found(0.0, f"The user asked again: {short(question, _SHOWN)}")
    return Found(1.0)


def correction(evidence: Evidence, settings: SignalSettings) -> Found | None:
    """Return 0 if a reply of the user corrects an answer, 1 if none does, and nothing without a reply."""
    phrases = (*CORRECTIONS, *settings.phrases)
    if not evidence.reactions:
        return None
    return Found(0.0 if any(has_phrase(text, phrases) for text in evidence.reactions) else 1.0)


def abandoned(evidence: Evidence, _settings: SignalSettings) -> Found | None:
    """Return 0 if the user left before an answer was complete, or without replying to a question of the agent."""
    if not evidence.is_over:
        return None
    if evidence.is_cut:
        return Found(0.0, "The user left before the answer was complete.")
    sentences = re.split(r"[.!?\n]\s", evidence.answer[-_SHOWN:].strip())
    if sentences[-1].endswith("?") and not has_phrase(sentences[-1], _COURTESIES):
        return Found(0.0, f"The user left without replying to: {short(sentences[-1], _SHOWN)}")
    return Found(1.0)


def tool_errors(evidence: Evidence, _settings: SignalSettings) -> Found | None:
    """Return the share of tool calls without an error, from the spans of tools or else from their messages."""
    spans = [span for span in evidence.spans if span.attributes.get(semconv.OPERATION) == semconv.OP_EXECUTE_TOOL]
    failures = [_failure(span) for span in spans] or [
        turn.text if _ERROR.match(turn.text) else "" for turn in evidence.turns if turn.role == "tool"
    ]
    if not failures:
        return None
    failed = [failure for failure in failures if failure]
    words = f"A tool failed: {short(failed[-1], _SHOWN)}" if failed else ""
    return Found(1 - len(failed) / len(failures), words)


def _failure(span: Span) -> str:
    return (span.status_message or span.name) if span.status == "error" else ""


BUILT_IN: Mapping[str, Signal] = {
    "thumbs": thumbs,
    "scores": scores,
    "repeated-question": repeated_question,
    "correction": correction,
    "abandoned": abandoned,
    "tool-errors": tool_errors,
}
"""The built-in signals by name."""


def recorded(evidence: Evidence, settings: SignalSettings) -> Found | None:
    """Return the newest reward that an evaluator or the learner recorded under the signal's name."""
    for span in reversed(evidence.spans):
        reward = span.reward
        if reward and reward.name == settings.use and reward.source in ("evaluator", "hook"):
            return None if reward.value is None else Found(scaled(reward.value, settings))
    return None


def scaled(value: float, settings: SignalSettings) -> float:
    """Map a value from the signal's range to 0 to 1; values outside the range count as its nearest end."""
    low, high = settings.range
    return min(1.0, max(0.0, (value - low) / (high - low)))


def recorded_id(rollout_id: str, name: str) -> str:
    """Return the id of the span in which the learner records the reward ``name``, so that it is recorded once."""
    return blake2b(f"agl-learn/{rollout_id}/{name}".encode(), digest_size=8).hexdigest()
