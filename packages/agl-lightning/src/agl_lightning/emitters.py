"""Emitters with the arguments of Agent Lightning.

``attributes`` is a dict, and ``propagate=False`` records nothing. Outside a rollout emitters do nothing.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from secrets import token_hex
from typing import Any, Self, TypeAlias, TypeVar, cast

import agl
from agl.errors import ConfigError
from agl.schemas import Reward, Span

F = TypeVar("F", bound=Callable[..., Any])
Value: TypeAlias = float | Mapping[str, float | None] | None


def emit_reward(
    reward: Value,
    *,
    primary_key: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    propagate: bool = True,
) -> Span:
    """Report a reward: a number, or a mapping of dimensions, where ``primary_key`` names the scalar.

    Returns:
        A span with the reward, also with ``propagate=False``, for ``get_reward_value`` and its like.

    Raises:
        ConfigError: ``attributes`` are given.
    """
    if attributes:
        raise ConfigError(
            f"emit_reward got the attributes {sorted(attributes)}, which a reward here does not carry; write "
            'agl.emit_reward(value, scope="span", span_id=...) to link it to a call, and name= for a label; see '
            "docs/how-to/rewards.md"
        )
    if propagate:
        agl.emit_reward(reward, primary=primary_key or "")
    dimensions = dict(reward) if isinstance(reward, Mapping) else {}
    primary = primary_key or (next(iter(dimensions)) if len(dimensions) == 1 else "")
    made = Reward(value=dimensions.get(primary) if isinstance(reward, Mapping) else reward, dimensions=dimensions)
    return Span(rollout_id="", attempt_id="", span_id=token_hex(8), name="reward", reward=made)


def emit_message(message: str, attributes: Mapping[str, Any] | None = None, *, propagate: bool = True) -> None:
    """Report a line of text."""
    if propagate:
        agl.emit_message(message, **(attributes or {}))


def emit_object(
    object: Any, attributes: Mapping[str, Any] | None = None, *, propagate: bool = True
) -> None:  # Agent Lightning's name
    """Report a value that JSON can carry."""
    if propagate:
        agl.emit_object(object, **(attributes or {}))


def emit_exception(
    exception: BaseException, attributes: Mapping[str, Any] | None = None, *, propagate: bool = True
) -> None:
    """Report an exception that the agent handled."""
    if propagate:
        agl.emit_exception(exception, **(attributes or {}))


def emit_annotation(annotation: Mapping[str, Any], *, propagate: bool = True) -> None:
    """Report attributes as an object called ``annotation``."""
    if propagate:
        agl.emit_object(dict(annotation), name="annotation")


def operation(function: Any = None, /, **settings: Any) -> Any:
    """Record a span around a block or around every call of a function: ``@operation``, ``with operation(name=...)``.

    Args:
        function: The function, where it decorates without arguments.
        settings: ``propagate=False`` records nothing; ``name`` is the span's name, by default the function's or
            ``operation``; all others are the span's attributes.
    """
    made = RecordedOperation(**settings)
    return made if function is None else made(function)


class RecordedOperation:
    """A span around a block or around every call of a function; made by :func:`operation`."""

    def __init__(self, *, propagate: bool = True, name: str | None = None, **attributes: Any) -> None:
        self._is_recorded, self._name, self._attributes = propagate, name, attributes
        self._open: agl.operation | None = None

    def __call__(self, function: F) -> F:
        """Record every call of a function, with arguments and result."""

        @wraps(function)
        def run(*args: Any, **settings: Any) -> Any:
            with self._named(function) as span:
                span.set_input(*args, **settings)
                return span.set_output(function(*args, **settings))

        @wraps(function)
        async def run_async(*args: Any, **settings: Any) -> Any:
            with self._named(function) as span:
                span.set_input(*args, **settings)
                return span.set_output(await function(*args, **settings))

        return cast("F", run_async if inspect.iscoroutinefunction(function) else run)

    def __enter__(self) -> Self:
        """Open the span."""
        if self._is_recorded:
            self._open = agl.operation(self._name or "operation", **self._attributes)
            self._open.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Close the span."""
        if self._open is not None:
            self._open.__exit__(*error)

    def set_input(self, *args: Any, **inputs: Any) -> None:
        """Record the inputs of the block."""
        self._set({**({"args": list(args)} if args else {}), **inputs})

    def set_output(self, output: Any) -> Any:
        """Record the output of the block, and return it."""
        self._set({"output": output})
        return output

    def _set(self, values: Mapping[str, Any]) -> None:
        if self._open is not None:
            self._open.set(**values)

    def _named(self, function: Callable[..., Any]) -> "RecordedOperation":
        name = self._name or getattr(function, "__name__", "operation")
        return RecordedOperation(propagate=self._is_recorded, name=name, **self._attributes)


def reward(function: F) -> F:
    """Decorate a function, sync or async: each return value is reported as a reward."""

    @wraps(function)
    def run(*args: Any, **settings: Any) -> Any:
        return _emitted(function(*args, **settings))

    @wraps(function)
    async def run_async(*args: Any, **settings: Any) -> Any:
        return _emitted(await function(*args, **settings))

    return cast("F", run_async if inspect.iscoroutinefunction(function) else run)


def _emitted(value: Any) -> Any:
    agl.emit_reward(value)
    return value
