"""Functions with which an agent reports rewards, observations, messages, objects, exceptions and operations.

Outside a rollout every emitter returns at once, whatever its arguments, so instrumented code runs unchanged in
production. Inside a rollout, each call records one span as a child of the innermost span. Credentials are removed from
emitted text. Lone surrogates become escapes and integers beyond 64 bits become text, because stores cannot hold them.
Only invalid arguments raise; failures to record are logged.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from types import TracebackType
from typing import Any, Self, SupportsFloat, TypeAlias, TypeVar, cast

import msgspec

from agl import semconv
from agl._redact import redact
from agl.errors import CaptureError
from agl.schemas import Reward, RewardScope
from agl.tracing._context import current, innermost
from agl.tracing._open_span import OpenSpan, open_span
from agl.tracing._spans import make_reward_span

F = TypeVar("F", bound=Callable[..., Any])
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
        name: The reward's name; of several rewards with one name, the last one counts.
        scope: Whether the reward is about the whole rollout, one turn, or one span.
        span_id: The span that the reward is about; required with scope ``span``. With scope ``turn`` the default is the
            newest model call.
        feedback: The reason for the reward as text, for prompt optimisers.
        primary: The dimension whose value becomes the reward's scalar. By default, a single dimension gives the scalar,
            and several dimensions give none.

    Raises:
        CaptureError: Only inside a rollout: a value is not a finite number, or the scope or ``primary`` is unknown.
    """
    attempt = current()
    # First of all: outside a rollout not even the arguments are looked at.
    if attempt is None:
        return
    if scope not in _SCOPES or (scope == "span" and not span_id):
        raise CaptureError(
            f"emit_reward got scope={scope!r} and span_id={span_id!r}; "
            'use scope="rollout", scope="turn", or scope="span" with the span_id it is about.'
        )
    dimensions: dict[str, Any] = {}
    scalar: Any = value
    # The test of the type first: isinstance with an abstract class costs more than all else here.
    if type(value) is not float and isinstance(value, Mapping):
        dimensions = {str(key): part for key, part in cast("Mapping[Any, Any]", value).items()}
        scalar = _primary(dimensions, primary)
    reward = Reward(
        value=scalar, name=name, dimensions=dimensions, scope=scope, span_id=span_id, feedback=redact(str(feedback))
    )
    ids = (attempt.rollout_id, attempt.attempt_id)
    attempt.add(make_reward_span(*ids, reward, trace_id=attempt.trace_id, parent_id=innermost(attempt)))


def emit_observation(*, role: str, content: Any) -> None:
    """Report an observation that the agent made outside its model calls.

    Args:
        role: The role of the observer.
        content: The observation; a JSON value.
    """
    if current() is not None:
        attributes = {semconv.OBSERVATION_ROLE: role, semconv.OBSERVATION_CONTENT: content}
        _emit(f"observation {role}", attributes)


def emit_message(message: str, /, **attributes: Any) -> None:
    """Report a line of text, with further attributes."""
    if current() is not None:
        _emit("message", {semconv.MESSAGE: str(message), **attributes})


def emit_object(value: Any, /, *, name: str = "object", **attributes: Any) -> None:
    """Report a JSON value, or a dataclass or struct of JSON values.

    Raises:
        CaptureError: Only inside a rollout: the value cannot be converted to JSON.
    """
    if current() is None:
        return
    try:
        # Now and not at the end of the rollout: the agent may change the object afterwards.
        body = msgspec.to_builtins(value, str_keys=True)
    except (TypeError, RecursionError) as error:
        raise CaptureError(
            f"emit_object got a {type(value).__name__} that JSON cannot carry ({error}); convert it first."
        ) from error
    _emit(f"object {name}", {semconv.OBJECT: body, **attributes})


def emit_exception(error: BaseException, /, **attributes: Any) -> None:
    """Report an exception that the agent handled, with its traceback."""
    if current() is not None:
        _emit(f"exception {type(error).__qualname__}", attributes, error)


def _emit(name: str, attributes: dict[str, Any], error: BaseException | None = None) -> None:
    """Record a span without duration as a child of the innermost span."""
    # Opened and closed at once, so that it lies below the innermost span like any other.
    span = open_span(name, attributes=attributes, is_current=False)
    span.close(error, status="unset" if error is None else "error", end_ns=span.start_ns)


def _primary(dimensions: Mapping[str, Any], primary: str) -> Any:
    if primary:
        if primary not in dimensions:
            raise CaptureError(
                f"emit_reward got primary={primary!r} but its dimensions are {sorted(dimensions)}; name one of these."
            )
        return dimensions[primary]
    return next(iter(dimensions.values())) if len(dimensions) == 1 else None


class operation:  # noqa: N801  # used like a function: with agl.operation("search")
    """Record a span around a ``with`` block, an ``async with`` block, or every call of a decorated function.

    Spans, rewards and model calls made inside become children of the span. An exception is recorded and passes through
    unchanged; a failure to record is logged and never raised. Outside a rollout nothing happens. Use an object for one
    block only; as a decorator it may run concurrently.

    Args:
        name: The span's name.
        attributes: The span's attributes, such as ``**{"gen_ai.agent.name": "writer"}``; JSON values.
    """

    # On the class, because outside a rollout only the two attributes below are ever set.
    _span: OpenSpan | None = None

    def __init__(self, name: str, /, **attributes: Any) -> None:
        self.name = name
        self._attributes = attributes

    @property
    def span_id(self) -> str | None:
        """Id of the open span, to pass to ``emit_reward`` with ``scope="span"``; ``None`` outside a rollout."""
        return (self._span.span_id or None) if self._span else None

    def set(self, **attributes: Any) -> None:
        """Add attributes to the span while the block runs."""
        self._attributes.update(attributes)

    def __enter__(self) -> Self:
        if current() is not None:
            self._span = open_span(self.name, attributes=self._attributes)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._span is not None:
            self._span.close(error)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def __call__(self, function: F) -> F:
        """Decorate a function or coroutine function; raises :class:`CaptureError` for generators.

        Inside a generator, use a ``with`` block instead.
        """
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise CaptureError(
                f"operation({self.name!r}) cannot decorate the generator {function.__qualname__}: "
                "its span would end before its body runs. Use `with agl.operation(...)` inside it."
            )
        name, attributes = self.name, self._attributes

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with operation(name, **attributes):
                return function(*args, **kwargs)

        @wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            with operation(name, **attributes):
                return await function(*args, **kwargs)

        return cast("F", run_async if inspect.iscoroutinefunction(function) else run)
