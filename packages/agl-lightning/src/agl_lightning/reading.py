"""Rewards, messages and objects of recorded spans."""

from collections.abc import Iterable, Sequence
from typing import Any

from agl import semconv
from agl.schemas import Reward, Span


def get_reward_value(span: Span) -> float | None:
    """Return the reward that a span reports, or ``None``."""
    return span.reward.value if span.reward is not None else None


def get_rewards_from_span(span: Span) -> list[Reward]:
    """Return the rewards that a span reports: the scalar first, then its dimensions."""
    if span.reward is None:
        return []
    parts = [Reward(value=value, name=name) for name, value in span.reward.dimensions.items()]
    return [span.reward, *parts]


def is_reward_span(span: Span) -> bool:
    """Return true if a span reports a reward."""
    return get_reward_value(span) is not None


def find_reward_spans(spans: Iterable[Span]) -> list[Span]:
    """Return the spans that report a reward."""
    return [span for span in spans if is_reward_span(span)]


def find_final_reward(spans: Sequence[Span]) -> float | None:
    """Return the last reward, or ``None`` without one."""
    return next((span.reward.value for span in reversed(find_reward_spans(spans)) if span.reward), None)


def get_message_value(span: Span) -> str | None:
    """Return the text of a message's span, or ``None``."""
    return span.attributes.get(semconv.MESSAGE)


def get_object_value(span: Span) -> Any:
    """Return the value of an object's span, or ``None``."""
    return span.attributes.get(semconv.OBJECT)
