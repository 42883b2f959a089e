"""The callback handler, which converts LangChain's events to runs and their spans.

The handler runs inline, in the task or thread that does the work, so that the run of a model call is known when the
request is sent. The handler never raises: failures are logged, and the run ends.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar, cast
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.callbacks.base import BaseCallbackManager
from langchain_core.runnables.config import var_child_runnable_config

from agl.tracing import ActiveAttempt, current, current_span_id
from agl_langchain._convert import about_error, about_model, about_output, classify
from agl_langchain._runs import Run

_log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

_MODEL: ContextVar[Run | None] = ContextVar("agl_langchain_model", default=None)


def _harmless(callback: F) -> F:
    """Log a callback's exception instead of raising it, because callbacks run inside the agent's own call."""

    @wraps(callback)
    def call(*args: Any, **kwargs: Any) -> None:
        try:
            callback(*args, **kwargs)
        except Exception:  # noqa: BLE001  # isolation point
            _log.exception("An event of LangChain could not be observed.")

    return cast("F", call)


class RunHandler(BaseCallbackHandler):
    """Observes the runs that start inside a rollout; one thread-safe object serves all rollouts."""

    run_inline = True

    def __init__(self) -> None:
        self._runs: dict[UUID, Run] = {}

    def current_run(self) -> Run | None:
        """Return the innermost run of this context that has a span; ``None`` if there is none."""
        attempt, running = current(), _running()
        if attempt is None:
            return None
        model = _MODEL.get()
        if model is not None and model.caller == running and model.attempt is attempt and _is_open(model):
            return model
        run = None if running is None else self._runs.get(running)
        return run.recorded() if run is not None and run.attempt is attempt else None

    def forget(self, attempt: ActiveAttempt) -> None:
        """Forget the runs that an ended attempt left open."""
        for run_id, run in tuple(self._runs.items()):
            if run.attempt is attempt:
                self._runs.pop(run_id, None)

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
        """Note that a chain, a graph, one of a graph's nodes, or a part of one started."""
        run = self._new(run_id, parent_run_id, kind="pass", name=_name(details, serialized))
        if run is not None:
            classify(run, metadata=metadata or {}, tags=tags or (), run_type=details.get("run_type"))
            thread = (metadata or {}).get("thread_id") if run.kind in ("agent", "workflow") else None
            run.describe(conversation=None if thread is None else str(thread))

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
        """Note that a tool started."""
        run = self._new(run_id, parent_run_id, kind="tool", name=_name(details, serialized))
        if run is not None:
            run.describe(arguments=input_str if inputs is None else inputs, call_id=details.get("tool_call_id"))

    @_harmless
    def on_chat_model_start(
        self,
        serialized: Mapping[str, Any] | None,
        messages: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: Mapping[str, Any] | None = None,
        **details: Any,
    ) -> None:
        """Note that a chat model was called; the request has not been sent yet."""
        run = self._new(run_id, parent_run_id, kind="model", name=str(details.get("name") or ""))
        if run is not None:
            run.describe(**about_model(serialized or {}, metadata or {}, details.get("invocation_params") or {}))
            run.caller = _running()
            _MODEL.set(run)

    def on_llm_start(self, serialized: Mapping[str, Any] | None, prompts: Any, **details: Any) -> None:
        """Note that a completion model was called; the request has not been sent yet."""
        self.on_chat_model_start(serialized, prompts, **details)

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
        """Note that a retriever started."""
        run = self._new(run_id, parent_run_id, kind="retrieval", name=_name(details, serialized))
        if run is not None:
            run.describe()

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **_: Any) -> None:
        """Note that a chain returned."""
        self._end(run_id, lambda run: about_output(run, outputs))

    def on_tool_end(self, output: Any, *, run_id: UUID, **_: Any) -> None:
        """Note that a tool returned."""
        self._end(run_id, lambda run: about_output(run, output))

    def on_llm_end(self, response: Any, *, run_id: UUID, **_: Any) -> None:
        """Note that a model answered, or that its stream was read to the end."""
        self._end(run_id, lambda _: {})

    def on_retriever_end(self, documents: Any, *, run_id: UUID, **_: Any) -> None:
        """Note that a retriever returned."""
        self._end(run_id, lambda _: {})

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        """Note that a chain raised; LangGraph also uses exceptions for hand-offs and interrupts."""
        self._end(run_id, lambda run: about_error(run, error))

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        """Note that a tool raised."""
        self._end(run_id, lambda run: about_error(run, error))

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        """Note that a model call failed for good, after the client's own retries."""
        self._end(run_id, lambda run: about_error(run, error))

    def on_retriever_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        """Note that a retriever raised."""
        self._end(run_id, lambda run: about_error(run, error))

    def _new(self, run_id: UUID, parent_run_id: UUID | None, **fields: Any) -> Run | None:
        """Create a run of the current attempt; return ``None`` outside an attempt."""
        attempt = current()
        if attempt is None:
            return None
        parent = None if parent_run_id is None else self._runs.get(parent_run_id)
        if parent is not None and parent.attempt is not attempt:
            parent = None
        run = self._runs[run_id] = Run(
            attempt=attempt, parent=parent, outer_span_id=self._outer_span_id(parent), **fields
        )
        return run

    def _outer_span_id(self, parent: Run | None) -> str | None:
        """Return the id of the span that encloses a new run; ``None`` if LangChain itself knows that span."""
        if parent is None:
            return current_span_id()
        around = self.current_run()
        if around is None or around is not parent.recorded() or around.span is None:
            return None  # the event comes from another context than the work: only LangChain knows the parent
        span_id = current_span_id()
        return None if span_id == around.span.span_id else span_id

    def _end(self, run_id: UUID, about: Callable[[Run], dict[str, Any]]) -> None:
        """Close the run's span with the arguments that ``about`` returns; if it raises, without a status."""
        run = self._runs.pop(run_id, None)
        if run is None or run.span is None:
            return
        found: dict[str, Any] = {"status": "unset"}
        try:
            found = about(run)
        except Exception:  # noqa: BLE001  # isolation point
            _log.exception("What %r returned could not be read.", run.name)
        run.span.close(**found)


def _is_open(run: Run) -> bool:
    return run.span is not None and run.span.is_open


def _name(details: Mapping[str, Any], serialized: Mapping[str, Any] | None) -> str:
    return str(details.get("name") or (serialized or {}).get("name") or "")


def _running() -> UUID | None:
    """Return the id of the run whose code is running, from LangChain's current configuration; ``None`` outside runs."""
    config = var_child_runnable_config.get()
    callbacks = config.get("callbacks") if config else None
    return callbacks.parent_run_id if isinstance(callbacks, BaseCallbackManager) else None
