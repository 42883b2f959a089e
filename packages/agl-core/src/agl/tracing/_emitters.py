"""Functions with which an agent reports rewards, observations, messages, objects and exceptions.

Outside a rollout every emitter returns at once, whatever its arguments, so instrumented code runs unchanged in
production. Inside, each records one span below the innermost one. Emitted text is scrubbed of credentials; halves of
characters become escapes, and integers beyond 64 bits become text, because no store carries them. Only invalid
arguments raise; failures to record are logged.
"""

import math
from collections.abc import Mapping
from typing import Any, SupportsFloat, TypeAlias, cast

import msgspec

from agl import semconv
from agl._redact import redact
from agl.errors import CaptureError
from agl.schemas import Reward, RewardScope
from agl.tracing._context import current, innermost
from agl.tracing._open_span import open_span
from agl.tracing._spans import make_reward_span

RewardValue: TypeAlias = SupportsFloat | Mapping[str, SupportsFloat | None] | None

_SCOPES = ("rollout", "turn", "span")


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
        name: The reward's name; of several with one name the last one counts.
        scope: Whether it is about the whole rollout, one turn, or one span.
        span_id: The span it is about; needed for scope ``span``. For ``turn`` the default is the newest model call.
        feedback: The reason in words, for prompt optimisers.
        primary: The dimension that is also the reward's scalar; by default the only one, if there is only one.

    Raises:
        CaptureError: Inside a rollout only: not a number, NaN or infinite, an unknown scope or dimension.
    """
    attempt = current()
    if attempt is None:
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
        value=scalar, name=name, dimensions=dimensions, scope=scope, span_id=span_id, feedback=redact(str(feedback))
    )
    ids = (attempt.rollout_id, attempt.attempt_id)
    attempt.add(make_reward_span(*ids, reward, trace_id=attempt.trace_id, parent_id=innermost(attempt)))


def emit_observation(*, role: str, content: Any) -> None:
    """Report an agent's observation outside its model calls; ``role`` is the observer's, ``content`` is JSON."""
    if current() is not None:
        attributes = {semconv.OBSERVATION_ROLE: role, semconv.OBSERVATION_CONTENT: content}
        _emit(f"observation {role}", attributes)


def emit_message(message: str, /, **attributes: Any) -> None:
    """Report a line of text, with further attributes."""
    if current() is None:
        return
    if not isinstance(message, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
        raise CaptureError(f"emit_message got {type(message).__name__}; pass text, or use emit_object for JSON values.")
    _emit("message", {semconv.MESSAGE: message, **attributes})


def emit_object(value: Any, /, *, name: str = "object", **attributes: Any) -> None:
    """Report a value that JSON can carry, or a dataclass or struct of such.

    Raises:
        CaptureError: Inside a rollout only: JSON cannot carry it.
    """
    if current() is None:
        return
    try:
        body = msgspec.to_builtins(value, str_keys=True)
    except (TypeError, RecursionError) as error:
        raise CaptureError(
            f"emit_object got a {type(value).__name__} that JSON cannot carry ({error}); convert it first."
        ) from error
    _emit(f"object {name}", {semconv.OBJECT: body, **attributes})


def emit_exception(error: BaseException, /, **attributes: Any) -> None:
    """Report an exception that the agent handled, with its traceback."""
    if current() is None:
        return
    if not isinstance(error, BaseException):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
        raise CaptureError(f"emit_exception got {type(error).__name__}; pass the exception that was caught.")
    _emit(f"exception {type(error).__qualname__}", attributes, error)


def _emit(name: str, attributes: dict[str, Any], error: BaseException | None = None) -> None:
    """Record a span of this instant, below the innermost one."""
    span = open_span(name, attributes=attributes, is_current=False)
    span.close(error, status="unset" if error is None else "error", end_ns=span.start_ns)


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
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise CaptureError(f"{what} is no finite number ({error}); pass one, None, or a mapping of them.") from error
    if not math.isfinite(number):
        raise CaptureError(f"{what} is {number}; pass a finite number, or None when there is no reward.")
    return number
