"""The callback handler: LangChain's events become runs, and runs that end become spans.

It runs inline, in the task or thread that does the work, so that the run that is noted when a model is called is
there when the request leaves. Nothing here raises: what goes wrong is logged, and the run ends.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar, cast
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.callbacks.base import BaseCallbackManager
from langchain_core.runnables.config import var_child_runnable_config

from agl.tracing import Capture, current, innermost
from agl_langchain._convert import (
    classify,
    client_attributes,
    model_attributes,
    span_of,
    take_error,
    take_output,
    thread_of,
    tool_attributes,
)
from agl_langchain._runs import Run

_log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

_MODEL: ContextVar[Run | None] = ContextVar("agl_langchain_model", default=None)


def _harmless(callback: F) -> F:
    """Log what a callback raises: it runs inside the agent's own call."""

    @wraps(callback)
    def call(*args: Any, **kwargs: Any) -> None:
        try:
            callback(*args, **kwargs)
        except Exception:  # noqa: BLE001  # isolation point
            _log.exception("An event of LangChain could not be observed.")

    return cast("F", call)


class RunHandler(BaseCallbackHandler):
    """Observes the runs that start inside a rollout; one object serves all of them, from any thread."""

    run_inline = True

    def __init__(self) -> None:
        self._runs: dict[UUID, Run] = {}

    def current_run(self) -> Run | None:
        """The innermost run of this context that becomes a span."""
        capture, inside = current(), _running()
        if capture is None:
            return None
        model = _MODEL.get()
        if model is not None and model.is_open and model.capture is capture and model.within == inside:
            return model
        run = None if inside is None else self._runs.get(inside)
        return run.recorded() if run is not None and run.capture is capture else None

    @_harmless
    def on_chain_start(
        self,
        serialized: Mapping[str, Any] | None,
        inputs: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        **details: Any,
    ) -> None:
        """A chain, a graph, one of its nodes, or a part of one began."""
        run = self._new(parent_run_id, kind="pass", name=_name(details, serialized))
        if run is None:
            return
        classify(run, metadata=metadata or {}, tags=tags or (), run_type=details.get("run_type"))
        if run.kind in ("agent", "workflow"):
            run.attributes.update(thread_of(metadata or {}))
        self._open(run_id, run)

    @_harmless
    def on_tool_start(
        self,
        serialized: Mapping[str, Any] | None,
        input_str: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        inputs: Mapping[str, Any] | None = None,
        **details: Any,
    ) -> None:
        """A tool began."""
        run = self._new(parent_run_id, kind="tool", name=_name(details, serialized))
        if run is None:
            return
        arguments = input_str if inputs is None else inputs
        run.attributes.update(tool_attributes(run.name, arguments=arguments, call_id=details.get("tool_call_id")))
        self._open(run_id, run)

    @_harmless
    def on_chat_model_start(
        self,
        serialized: Mapping[str, Any],
        messages: Sequence[Any],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: Mapping[str, Any] | None = None,
        **details: Any,
    ) -> None:
        """A chat model was called; the request has not left yet."""
        self._start_model(run_id, parent_run_id, metadata, serialized, details)

    @_harmless
    def on_llm_start(
        self,
        serialized: Mapping[str, Any],
        prompts: Sequence[str],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: Mapping[str, Any] | None = None,
        **details: Any,
    ) -> None:
        """A completion model was called; the request has not left yet."""
        self._start_model(run_id, parent_run_id, metadata, serialized, details)

    @_harmless
    def on_retriever_start(
        self,
        serialized: Mapping[str, Any] | None,
        query: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **details: Any,
    ) -> None:
        """A retriever began."""
        run = self._new(parent_run_id, kind="retrieval", name=_name(details, serialized))
        if run is not None:
            self._open(run_id, run)

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **_: Any) -> None:
        """A chain returned."""
        self._end(run_id, outputs)

    def on_tool_end(self, output: Any, *, run_id: UUID, **_: Any) -> None:
        """A tool returned."""
        self._end(run_id, output)

    def on_llm_end(self, response: Any, *, run_id: UUID, **_: Any) -> None:
        """A model answered, or its stream was read to the end."""
        self._end(run_id, None)

    def on_retriever_end(self, documents: Any, *, run_id: UUID, **_: Any) -> None:
        """A retriever returned."""
        self._end(run_id, None)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        """A chain raised; LangGraph also hands off and interrupts that way."""
        self._fail(run_id, error)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        """A tool raised."""
        self._fail(run_id, error)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        """A model call failed for good, after the client's own retries."""
        self._fail(run_id, error)

    def on_retriever_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        """A retriever raised."""
        self._fail(run_id, error)

    def _new(self, parent_run_id: UUID | None, **fields: Any) -> Run | None:
        """A run of the current attempt, ``None`` outside one."""
        capture = current()
        if capture is None:
            return None
        parent = None if parent_run_id is None else self._runs.get(parent_run_id)
        if parent is not None and parent.capture is not capture:
            parent = None
        return Run(capture=capture, parent=parent, above=self._above(capture, parent), **fields)

    def _above(self, capture: Capture, parent: Run | None) -> str | None:
        """The span around a new run where LangChain does not know it, else ``None``."""
        if parent is None:
            return innermost(capture)
        around, recorded = self.current_run(), parent.recorded()
        if around is None or around is not recorded:
            return None  # the event comes from another context than the work: only LangChain knows the parent
        span_id = innermost(capture)
        return None if span_id == around.span_id else span_id

    def _start_model(
        self,
        run_id: UUID,
        parent_run_id: UUID | None,
        metadata: Mapping[str, Any] | None,
        serialized: Mapping[str, Any] | None,
        details: Mapping[str, Any],
    ) -> None:
        run = self._new(parent_run_id, kind="model", name=str(details.get("name") or ""))
        if run is None:
            return
        run.attributes.update(model_attributes(metadata or {}, details.get("invocation_params") or {}))
        run.attributes.update(client_attributes(serialized or {}))
        run.within = _running()
        self._open(run_id, run)
        _MODEL.set(run)

    def _open(self, run_id: UUID, run: Run) -> None:
        self._runs[run_id] = run
        run.capture.closers[id(run)] = lambda: self._close(run_id)
        run.capture.starts[run.span_id] = time.perf_counter_ns()
        run.capture.opened[run.span_id] = lambda: span_of(run, is_ended=False)

    def _close(self, run_id: UUID) -> None:
        """The attempt ends before the run does."""
        run = self._taken(run_id)
        if run is not None and run.kind != "pass":
            run.capture.record(span_of(run, is_ended=False))

    def _taken(self, run_id: UUID) -> Run | None:
        run = self._runs.pop(run_id, None)
        if run is not None:
            run.is_open = False
            run.capture.closers.pop(id(run), None)
            run.capture.starts.pop(run.span_id, None)
            run.capture.opened.pop(run.span_id, None)
        return run

    def _end(self, run_id: UUID, output: Any) -> None:
        self._finish(run_id, lambda run: take_output(run, output))

    def _fail(self, run_id: UUID, error: BaseException) -> None:
        self._finish(run_id, lambda run: take_error(run, error))

    @_harmless
    def _finish(self, run_id: UUID, status_of: Callable[[Run], dict[str, Any]]) -> None:
        run = self._taken(run_id)
        if run is None or run.kind == "pass":
            return
        try:
            status = status_of(run)
        except Exception:  # noqa: BLE001  # isolation point: the span ends without what cannot be read
            _log.exception("What %r returned could not be read.", run.name)
            status = {}
        run.capture.record(span_of(run, **status))


def _name(details: Mapping[str, Any], serialized: Mapping[str, Any] | None) -> str:
    return str(details.get("name") or (serialized or {}).get("name") or "")


def _running() -> UUID | None:
    """The run whose code runs here, from the configuration that LangChain hands down; ``None`` outside of any."""
    config = var_child_runnable_config.get()
    callbacks = config.get("callbacks") if config else None
    return callbacks.parent_run_id if isinstance(callbacks, BaseCallbackManager) else None
