"""What instrumented code calls: rewards, observations, messages, objects, exceptions and operations.

Outside a rollout every emitter returns at once, whatever it was given, so instrumented code runs unchanged in
production. Inside, each records one span below the innermost one. Emitted text is scrubbed of credentials.
"""

import math
import time
import traceback
from collections.abc import Mapping
from typing import Any, SupportsFloat, TypeAlias, cast

import msgspec

from agl import semconv
from agl._redact import redact
from agl.errors import CaptureError
from agl.schemas import Reward, RewardScope, Span, SpanEvent
from agl.schemas._ids import new_span_id
from agl.tracing._context import Capture, current, innermost

RewardValue: TypeAlias = SupportsFloat | Mapping[str, SupportsFloat | None] | None

_SCOPES = ("rollout", "turn", "span")
_PLAIN = frozenset({str, int, float, bool, type(None)})


def emit_reward(
    value: RewardValue,
    *,
    name: str = "",
    scope: RewardScope = "rollout",
    span_id: str | None = None,
    feedback: str = "",
    primary: str = "",
) -> None:
    """Report a reward.

    Args:
        value: A finite number, ``None`` for "no opinion", or a mapping of named dimensions.
        name: Which reward this is; several of one name replace each other, the last one counts.
        scope: Whether it is about the whole rollout, one turn, or one span.
        span_id: The span it is about; needed for scope ``span``. For ``turn`` the default is the newest model call.
        feedback: Why, in words, for prompt optimisers.
        primary: The dimension that is also the reward's scalar; without it a single dimension is, several are not.

    Raises:
        CaptureError: Inside a rollout only: not a number, NaN or infinite, an unknown scope or dimension.
    """
    capture = current()
    if capture is None:
        return
    if scope not in _SCOPES or (scope == "span" and not span_id):
        raise CaptureError(
            f"emit_reward got scope={scope!r} and span_id={span_id!r}; "
            'use scope="rollout", scope="turn", or scope="span" with the span_id it is about.'
        )
    dimensions: dict[str, float | None] = {}
    if type(value) is not float and isinstance(value, Mapping):
        dimensions = _dimensions(cast("Mapping[str, Any]", value))
        scalar = _primary(dimensions, primary)
    else:
        scalar = _finite(value, what="the reward")
    reward = Reward(
        value=scalar,
        name=name,
        dimensions=dimensions,
        scope=scope,
        span_id=span_id,
        feedback=redact(feedback),
    )
    attributes: dict[str, Any] = {semconv.OPERATION: semconv.OP_EVALUATE, semconv.EVALUATION_NAME: name or "reward"}
    if scalar is not None:
        attributes[semconv.EVALUATION_SCORE] = scalar
    if feedback:
        attributes[semconv.EVALUATION_EXPLANATION] = reward.feedback
    _emit(capture, f"{semconv.OP_EVALUATE} {name or 'reward'}", attributes, reward=reward)


def emit_observation(*, role: str, content: Any) -> None:
    """Report what an agent saw outside its model calls; ``role`` says whose view it is, ``content`` is JSON."""
    capture = current()
    if capture is not None:
        attributes = {semconv.OBSERVATION_ROLE: role, semconv.OBSERVATION_CONTENT: plain(content)}
        _emit(capture, f"observation {role}", attributes)


def emit_message(message: str, **attributes: Any) -> None:
    """Report a line of text, with further attributes."""
    capture = current()
    if capture is None:
        return
    if not isinstance(message, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
        raise CaptureError(f"emit_message got {type(message).__name__}; pass text, or use emit_object for JSON values.")
    _emit(capture, "message", {semconv.MESSAGE: redact(message), **plain(attributes)})


def emit_object(value: Any, *, name: str = "object", **attributes: Any) -> None:
    """Report a value that JSON can carry, or a dataclass or struct of such.

    Raises:
        CaptureError: Inside a rollout only: JSON cannot carry it.
    """
    capture = current()
    if capture is None:
        return
    try:
        body = msgspec.to_builtins(value, str_keys=True)
    except (TypeError, RecursionError) as error:
        raise CaptureError(
            f"emit_object got a {type(value).__name__} that JSON cannot carry ({error}); convert it first."
        ) from error
    _emit(capture, f"object {name}", {semconv.OBJECT: plain(body), **plain(attributes)})


def emit_exception(error: BaseException, **attributes: Any) -> None:
    """Report an exception that the agent handled, with its traceback."""
    capture = current()
    if capture is None:
        return
    if not isinstance(error, BaseException):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
        raise CaptureError(f"emit_exception got {type(error).__name__}; pass the exception that was caught.")
    kind = type(error).__qualname__
    span = new_span(capture, f"exception {kind}", {semconv.ERROR_TYPE: kind, **plain(attributes)})
    failed = msgspec.structs.replace(span, **failure(error))
    capture.record(failed)


def new_span(capture: Capture, name: str, attributes: dict[str, Any], *, reward: Reward | None = None) -> Span:
    """A span of this instant, below the innermost one."""
    now = time.time_ns()
    return Span(
        rollout_id=capture.rollout_id,
        attempt_id=capture.attempt_id,
        trace_id=capture.trace_id,
        span_id=new_span_id(),
        parent_id=innermost(capture),
        name=name,
        start_ns=now,
        end_ns=now,
        attributes=attributes,
        reward=reward,
    )


def failure(error: BaseException) -> dict[str, Any]:
    """The fields of a span that ended with ``error``: status, message, and an ``exception`` event."""
    text = redact(str(error))
    trace = redact("".join(traceback.format_exception(error)))
    detail = {"exception.type": type(error).__qualname__, "exception.message": text, "exception.stacktrace": trace}
    event = SpanEvent(name="exception", time_ns=time.time_ns(), attributes=detail)
    return {"status": "error", "status_message": text, "events": (event,)}


def plain(value: Any) -> Any:
    """A copy of ``value`` that JSON can carry, without credentials; what JSON lacks becomes its text."""
    if type(value) is str:
        return redact(value)
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in cast("list[Any]", value)]
    return redact(str(value))


def _emit(capture: Capture, name: str, attributes: dict[str, Any], *, reward: Reward | None = None) -> None:
    capture.record(new_span(capture, name, attributes, reward=reward))


def _dimensions(value: Mapping[str, SupportsFloat | None]) -> dict[str, float | None]:
    return {str(key): _finite(item, what=f"the dimension {key!r}") for key, item in value.items()}


def _primary(dimensions: dict[str, float | None], primary: str) -> float | None:
    if primary:
        if primary not in dimensions:
            raise CaptureError(
                f"emit_reward got primary={primary!r} but its dimensions are {sorted(dimensions)}; name one of these."
            )
        return dimensions[primary]
    return next(iter(dimensions.values())) if len(dimensions) == 1 else None


def _finite(value: Any, *, what: str) -> float | None:
    if value is None:
        return None
    if type(value) is not float and (isinstance(value, str | bytes) or not hasattr(value, "__float__")):
        raise CaptureError(f"{what} is {value!r} ({type(value).__name__}); pass a number, None, or a mapping of them.")
    number = float(value)
    if not math.isfinite(number):
        raise CaptureError(f"{what} is {number}; pass a finite number, or None when there is no reward.")
    return number
