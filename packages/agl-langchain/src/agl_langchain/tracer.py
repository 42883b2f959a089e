"""Attributes model calls to agents and nodes in LangChain and LangGraph, through the callbacks of both.

LangChain finds the handler in a context variable that is set during each attempt. So agents need no change, nothing
is observed outside of rollouts, and uploads to LangSmith are off inside rollouts. The gateway or the wire hook records
the model calls themselves; the ``chat`` spans made here say which agent or node made them.
"""

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from agl.tracing import ActiveAttempt, SharedTracer, Undo, around_attempts

if TYPE_CHECKING:
    from agl_langchain._handler import RunHandler

_HANDLER: ContextVar["RunHandler | None"] = ContextVar("agl_langchain_handler", default=None)
"""The handler that LangChain calls when a run starts; set only during attempts."""


class LangChainTracer(SharedTracer):
    """Observes LangChain and LangGraph; see the module. Several tracers may be installed; they share one handler."""

    _handler: ClassVar["RunHandler | None"] = None

    def get_langchain_handler(self) -> "RunHandler":
        """Return the callback handler, for agents that pass it themselves: ``config={"callbacks": [handler]}``.

        If the tracer is installed as well, runs are still recorded only once.
        """
        handler = self._handler
        if handler is None:
            from agl_langchain._handler import RunHandler  # loads LangChain

            handler = LangChainTracer._handler = RunHandler()
        return handler

    def observe(self) -> Iterable[Undo]:
        """Register the handler with LangChain, for attempts that start from now on."""
        from langchain_core.tracers.context import register_configure_hook

        handler = self.get_langchain_handler()
        register_configure_hook(_HANDLER, inheritable=True)
        yield partial(_unregister, _HANDLER)
        yield around_attempts(partial(_observe, handler))

    def current_span_id(self) -> str | None:
        """Return the id of the span of the innermost run in this context; ``None`` outside of runs."""
        run = None if self._handler is None else self._handler.current_run()
        return None if run is None or run.span is None else run.span.span_id

    def worker_env(self) -> Mapping[str, str]:
        """Return the variables, of older and newer releases, that turn LangSmith's uploads off."""
        return {"LANGSMITH_TRACING": "false", "LANGCHAIN_TRACING_V2": "false"}


@contextmanager
def _observe(handler: "RunHandler", attempt: ActiveAttempt) -> Generator[None]:
    """Set the handler during one attempt, and turn uploads off."""
    from langsmith.run_helpers import tracing_context  # pyright: ignore[reportUnknownVariableType]  # open types

    token = _HANDLER.set(handler)
    try:
        with tracing_context(enabled=False):
            yield
    finally:
        _HANDLER.reset(token)
        handler.forget(attempt)


def _unregister(variable: ContextVar[Any]) -> None:
    """Remove the hook from LangChain's private list, because LangChain has no function that removes it."""
    from langchain_core.tracers import context

    hooks: list[tuple[Any, ...]] = getattr(context, "_configure_hooks", [])
    for index, hook in enumerate(hooks):
        if hook[0] is variable:
            del hooks[index]
            return
