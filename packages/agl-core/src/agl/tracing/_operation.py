"""``agl.operation``: a named span around a block or a function, sync or async."""

import inspect
import time
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from agl import semconv
from agl.errors import CaptureError
from agl.schemas import Span
from agl.schemas._ids import new_span_id
from agl.tracing._context import Capture, Scope, current, current_scope, framework_span_id, innermost, set_scope
from agl.tracing._emitters import failure, plain

F = TypeVar("F", bound=Callable[..., Any])


class operation:  # noqa: N801  # used like a function: with agl.operation("search")
    """Record a span around a ``with`` block, an ``async with`` block, or every call of a decorated function.

    Spans, rewards and model calls made inside become its children. An exception passes through untouched and is
    recorded. Outside a rollout nothing happens. One object serves one block; a decorator may run concurrently.

    Args:
        name: The span's name.
        attributes: The span's attributes, such as ``**{"gen_ai.agent.name": "writer"}``; JSON values.
    """

    # On the class, because outside a rollout nothing else than the two attributes below is ever set.
    _capture: Capture | None = None
    _scope: Scope | None = None
    _outer: Scope | None = None
    _parent: str | None = None
    _start = 0

    def __init__(self, name: str, /, **attributes: Any) -> None:
        self.name = name
        self._attributes = attributes

    @property
    def span_id(self) -> str | None:
        """Id of the open span, for ``emit_reward(..., scope="span", span_id=...)``; ``None`` outside a rollout."""
        return self._scope.span_id if self._scope else None

    def set(self, **attributes: Any) -> None:
        """Add attributes while the block runs."""
        self._attributes = {**self._attributes, **attributes}

    def __enter__(self) -> Self:
        capture = current()
        if capture is not None:
            self._capture = capture
            self._outer = current_scope()
            self._parent = innermost(capture)
            scope = self._scope = Scope(new_span_id(), framework_span_id(capture))
            set_scope(scope)
            self._start = time.time_ns()
            capture.opened[scope.span_id] = lambda: self._span(capture, scope, None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._capture is not None and self._scope is not None:
            set_scope(self._outer)
            self._capture.opened.pop(self._scope.span_id, None)
            self._capture.record(self._span(self._capture, self._scope, error))

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

    def _span(self, capture: Capture, scope: Scope, error: BaseException | None) -> Span:
        attributes: dict[str, Any] = plain(self._attributes)
        ended: dict[str, Any] = {"status": "ok"}
        if error is not None and not isinstance(error, GeneratorExit):
            ended = failure(error)
            attributes[semconv.ERROR_TYPE] = type(error).__qualname__
        return Span(
            rollout_id=capture.rollout_id,
            attempt_id=capture.attempt_id,
            trace_id=capture.trace_id,
            span_id=scope.span_id,
            parent_id=self._parent,
            name=self.name,
            start_ns=self._start,
            end_ns=time.time_ns(),
            attributes=attributes,
            **ended,
        )
