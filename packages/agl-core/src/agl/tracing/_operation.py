"""``agl.operation``: a named span around a block or a function, sync or async."""

import inspect
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from agl.errors import CaptureError
from agl.tracing._context import current
from agl.tracing._open_span import OpenSpan, open_span

F = TypeVar("F", bound=Callable[..., Any])


class operation:  # noqa: N801  # used like a function: with agl.operation("search")
    """Record a span around a ``with`` block, an ``async with`` block, or every call of a decorated function.

    Spans, rewards and model calls made inside become its children. An exception passes through untouched and is
    recorded; a failure to record is logged and never raised. Outside a rollout nothing happens. One object serves
    one block; a decorator may run concurrently.

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
        """Id of the open span, for ``emit_reward(..., scope="span", span_id=...)``; ``None`` outside a rollout."""
        return (self._span.span_id or None) if self._span else None

    def set(self, **attributes: Any) -> None:
        """Add attributes while the block runs."""
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
        """Decorate a function or coroutine function; generators are refused, use ``with`` inside them."""
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
