"""Makes spans of model calls and rewards, by the GenAI conventions."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from msgspec.structs import replace

from agl import semconv
from agl.errors import CaptureError
from agl.schemas import Dialect, Json, ModelCall, Reward, Span, Usage
from agl.schemas._ids import new_span_id
from agl.tracing._span_values import whole

# chat is the convention's word for every other API.
_OPERATIONS: dict[Dialect, str] = {"completions": semconv.OP_TEXT_COMPLETION, "embeddings": semconv.OP_EMBEDDINGS}


def chat_spans(
    calls: Sequence[ModelCall],
    *,
    rollout_id: str,
    attempt_id: str,
    trace_id: str,
    parent_id: str | None,
    framework_span_id: str,
    start_ns: int,
    end_ns: int,
    about: Mapping[str, Json] | None = None,
) -> list[Span]:
    """Make one span per call, with the parent ``parent_id`` and the attributes ``about``.

    Args:
        calls: The model calls.
        rollout_id: The rollout.
        attempt_id: The attempt.
        trace_id: The trace.
        parent_id: The enclosing span.
        framework_span_id: The framework span that the client named; ``""`` if it named none.
        start_ns: Start in Unix nanoseconds.
        end_ns: End in Unix nanoseconds.
        about: Further attributes of all spans, such as the caller's names.
    """
    return [
        Span(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            span_id=new_span_id(),
            trace_id=trace_id,
            parent_id=parent_id,
            name=f"{_OPERATIONS.get(call.dialect, semconv.OP_CHAT)} {call.model}".rstrip(),
            kind="client",
            start_ns=start_ns,
            end_ns=end_ns,
            status="error" if call.error else "ok",
            status_message=call.error,
            attributes={**(about or {}), **_attributes(call, framework_span_id)},
            call=call,
        )
        for call in calls
    ]


def make_reward_span(
    rollout_id: str, attempt_id: str, reward: Reward, *, trace_id: str = "", parent_id: str | None = None
) -> Span:
    """Make the span of a reward, by the GenAI conventions for evaluations.

    Numbers of other types become floats, and lone surrogates become escapes.

    Raises:
        CaptureError: A value of the reward is NaN, infinite, or not a number.
    """
    about = f"the reward {reward.name!a} of rollout {rollout_id!r}"
    dimensions = {whole(key): _finite(part, f"{key!a} of {about}") for key, part in reward.dimensions.items()}
    reward = replace(
        reward,
        value=_finite(reward.value, about),
        name=whole(reward.name),
        dimensions=dimensions,
        weights={whole(key): float(part) for key, part in reward.weights.items()},
        feedback=whole(reward.feedback),
    )
    # A reward is an instant: it has no duration.
    now, name = time.time_ns(), reward.name or "reward"
    attributes: dict[str, Any] = {semconv.OPERATION: semconv.OP_EVALUATE, semconv.EVALUATION_NAME: name}
    if reward.value is not None:
        attributes[semconv.EVALUATION_SCORE] = reward.value
    if reward.feedback:
        attributes[semconv.EVALUATION_EXPLANATION] = reward.feedback
    return Span(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        span_id=new_span_id(),
        trace_id=trace_id,
        parent_id=parent_id,
        name=f"{semconv.OP_EVALUATE} {name}",
        start_ns=now,
        end_ns=now,
        attributes=attributes,
        reward=reward,
    )


def _finite(value: Any, about: str) -> float | None:
    """Convert a number, also of NumPy or torch, to a float; raises :class:`CaptureError` if it is not finite."""
    if value is None:
        return None
    if type(value) is not float and (isinstance(value, str | bytes) or not hasattr(value, "__float__")):
        raise CaptureError(f"{about} is {value!r} ({type(value).__name__}); pass a number, or None.")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise CaptureError(
            f"{about} is not a finite number ({error}); pass one, None, or a mapping of them."
        ) from error
    if not math.isfinite(number):
        raise CaptureError(f"{about} is {number}; pass a finite number, or None when there is no reward.")
    return number


def check_reward(reward: Reward | None, rollout_id: str) -> None:
    """Raise :class:`CaptureError` if the reward is NaN or infinite."""
    if reward is not None and reward.fault:
        raise CaptureError(
            f"the reward {reward.name!r} of rollout {rollout_id!r} is {reward.fault}; give a finite number, or None "
            "when there is no reward."
        )


def _attributes(call: ModelCall, framework_span_id: str) -> dict[str, Any]:
    answer = _mapping(call.response)
    found: dict[str, Any] = {
        semconv.OPERATION: _OPERATIONS.get(call.dialect, semconv.OP_CHAT),
        semconv.REQUEST_MODEL: call.model,
        semconv.RESPONSE_MODEL: answer.get("model"),
        semconv.RESPONSE_ID: answer.get("id"),
        semconv.FINISH_REASONS: [call.finish_reason] if call.finish_reason else None,
        semconv.MODEL_VERSION: call.model_version,
        semconv.ERROR_TYPE: _error_type(call),
        # By this link, and never by names or times, a call is joined to the agent that made it.
        semconv.FRAMEWORK_SPAN_ID: framework_span_id,
        **_usage(Usage.read(answer.get("usage")), call),
    }
    return {name: value for name, value in found.items() if value not in (None, "")}


def _error_type(call: ModelCall) -> str:
    if not call.error:
        return ""
    # The conventions ask for the status code where there is one.
    return str(call.status_code) if call.status_code >= 400 else "incomplete" if call.status_code else "no_response"


def _usage(usage: Usage, call: ModelCall) -> dict[str, int]:
    """Token counts as attributes: the number of token ids, or without ids the backend's counts."""
    counts = {
        semconv.INPUT_TOKENS: call.prompt_len or usage.prompt,
        semconv.OUTPUT_TOKENS: call.response_len or usage.answer,
        semconv.CACHE_READ_TOKENS: usage.cached,
        semconv.CACHE_CREATION_TOKENS: usage.written,
    }
    return {name: count for name, count in counts.items() if count}


# The same as as_dict of agl.dialects, which a program that only emits rewards should not have to import.
def _mapping(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
