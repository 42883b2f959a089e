"""Runs one attempt in this process: calls the agent, stops it at its time limit, and builds the attempt's outcome.

The `async` runner uses this module in the experiment's process, the `process` runner in a child process.
"""

import asyncio
import contextvars
import ctypes
import inspect
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import msgspec

from agl import semconv
from agl.contracts import DivergenceError, Tracer, Upstream, trains
from agl.errors import CaptureError, RunError
from agl.schemas import (
    LLM,
    AttemptStatus,
    ErrorInfo,
    Json,
    NamedResources,
    Outcome,
    Reward,
    Rollout,
    Span,
    new_span_id,
    new_trace_id,
)
from agl.tracing import ActiveAttempt, SpanRecorder, activate, make_reward_span
from agl_run.agents.agent import LoadedAgent
from agl_run.replay.fork_player import ForkPlayer, ForkScript
from agl_run.replay.player import Player
from agl_run.replay.script import Script
from agl_run.runners.refusals import RefusedCalls
from agl_run.runners.result import describe_error, read_result
from agl_run.runners.storable import storable_span

STOP_GRACE_S = 5.0
"""Seconds that a cancelled agent may take to stop; after that the attempt ends without it."""


class AttemptStopped(BaseException):
    """Raised in an agent's thread to stop the agent; not an ``Exception``, so that agents do not catch it."""


async def run_attempt(
    agent: LoadedAgent, rollout: Rollout, active: ActiveAttempt, *, resources: NamedResources, recorder: SpanRecorder
) -> Outcome:
    """Run the agent once; return the outcome, with the spans that are still in ``recorder``.

    Errors of the agent are in the outcome and never raised. Cancelling this coroutine stops the agent and then raises.

    Args:
        agent: The agent.
        rollout: The rollout.
        active: The attempt; see :func:`new_attempt`.
        resources: Named resources, without the attempt's token.
        recorder: Collects the spans of the attempt in this process.
    """
    # Wrapped around the recorder: the attempt's error can then say why a client had no key.
    refused = RefusedCalls(active.record, has_gateway=bool(active.gateway_url))
    active = replace(active, record=refused.record)
    # Wall time, because spans of several machines are compared.
    started = time.time_ns()
    with activate(active):
        status, error, value = await _run_limited(agent, rollout, bind_resources(resources, token=active.token))
    # An agent may swallow a divergence as if it were a failed call, and end well with wrong
    # answers.
    status, error = _checked(active, status, error)
    for tracer in active.tracers:
        # Frameworks end their spans in their own threads; spans that are not flushed now would be
        # lost.
        tracer.flush(1.0)
    status, error, output, rewards = _read(status, refused.explained(error), value, active)
    root = _root_span(active, started, status, error, output)
    return Outcome(
        attempt_id=active.attempt_id,
        status=status,
        error=error,
        # The root is written with the outcome, because it ends with the attempt.
        spans=(root, *recorder.drain(), *rewards),
    )


def new_attempt(
    rollout: Rollout,
    attempt_id: str,
    recorder: SpanRecorder,
    *,
    token: str,
    gateway_url: str,
    upstreams: Sequence[Upstream],
    tracers: Iterable[Tracer],
    replay: Script | None,
) -> ActiveAttempt:
    """Create the record of a starting attempt; ``replay`` is the script of a replay or a fork, else ``None``."""
    player = None if replay is None else ForkPlayer(replay) if isinstance(replay, ForkScript) else Player(replay)
    return ActiveAttempt(
        rollout_id=rollout.rollout_id,
        attempt_id=attempt_id,
        trace_id=new_trace_id(),
        root_span_id=new_span_id(),
        record=lambda span: recorder.record(storable_span(span)),
        token=token,
        gateway_url=gateway_url,
        upstreams=upstreams_of(rollout, upstreams),
        tracers=tuple(tracers),
        responder=player,
    )


def bind_resources(resources: NamedResources, *, token: str) -> NamedResources:
    """Set the attempt's token as the key of every LLM that has no key of its own."""
    return {
        name: msgspec.structs.replace(value, api_key=token)
        if isinstance(value, LLM) and token and not value.api_key_env
        else value
        for name, value in resources.items()
    }


def _checked(
    active: ActiveAttempt, status: AttemptStatus, error: ErrorInfo | None
) -> tuple[AttemptStatus, ErrorInfo | None]:
    """Return the agent's outcome, or a failure if the attempt is a fork that diverged."""
    if not isinstance(active.responder, ForkPlayer):
        return status, error
    diverged = active.responder.divergence(is_over=status == "succeeded")
    return ("failed", describe_error(DivergenceError(diverged))) if diverged else (status, error)


def upstreams_of(rollout: Rollout, upstreams: Sequence[Upstream]) -> tuple[Upstream, ...]:
    """Return the policies that a rollout's calls use, without ``sampling`` unless they train on the rollout."""
    # Validation measures the agent as it will be used, with the sampling that it asks for.
    return tuple(
        upstream if trains(rollout, upstream.name) else msgspec.structs.replace(upstream, sampling="")
        for upstream in upstreams
    )


async def _run_limited(
    agent: LoadedAgent, rollout: Rollout, resources: NamedResources
) -> tuple[AttemptStatus, ErrorInfo | None, Any]:
    invocation = _Invocation(agent, rollout, resources)
    # A task of its own: a timeout must be able to leave it behind if it does not stop.
    task = asyncio.ensure_future(invocation.run())
    task.add_done_callback(_notice)
    try:
        # ``wait`` and not ``wait_for``: the latter would wait for an agent that ignores its
        # cancellation.
        done, _ = await asyncio.wait({task}, timeout=rollout.retry.timeout_s)
    except asyncio.CancelledError:
        await invocation.stop(task)
        raise
    if not done:
        stopped = await invocation.stop(task)
        return "timeout", _timeout_error(rollout.retry.timeout_s, stopped=stopped), None
    # The agent cancelled itself; a cancellation of the attempt is handled above.
    if task.cancelled():
        return "failed", ErrorInfo(type="asyncio.CancelledError", message="the agent raised CancelledError"), None
    error = task.exception()
    if error is not None:
        return "failed", describe_error(error.error if isinstance(error, _AgentExitError) else error), None
    return "succeeded", None, task.result()


class _AgentExitError(Exception):
    """Wraps an agent's ``SystemExit`` or ``KeyboardInterrupt``, so that it does not stop the event loop."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class _Invocation:
    """A running call of the agent: a coroutine on the event loop, or a function in a thread."""

    def __init__(self, agent: LoadedAgent, rollout: Rollout, resources: NamedResources) -> None:
        self._agent = agent
        self._arguments = (rollout, resources)
        self._future: asyncio.Future[Any] | None = None
        self._thread: int | None = None
        self._lock = threading.Lock()

    async def run(self) -> Any:
        try:
            if self._agent.is_async:
                return await self._agent.call(*self._arguments)
            # The thread needs the context variable with the attempt, or its calls would belong to
            # no attempt.
            context = contextvars.copy_context()
            self._future = asyncio.get_running_loop().run_in_executor(AgentThreads(), context.run, self._in_thread)
            self._future.add_done_callback(_notice)
            # Cancelling this must not abandon the thread's future: ``stop`` interrupts the thread
            # and waits for it.
            value = await asyncio.shield(self._future)
            # A plain function may return a coroutine, as decorated agents do.
            return await value if inspect.isawaitable(value) else value
        except (SystemExit, KeyboardInterrupt) as error:
            raise _AgentExitError(error) from error

    def _in_thread(self) -> Any:
        with self._lock:
            # Under the lock, so that an interrupt never hits a thread that already does other work.
            self._thread = threading.get_ident()
        try:
            return self._agent.call(*self._arguments)
        except (SystemExit, KeyboardInterrupt, AttemptStopped, asyncio.CancelledError) as error:
            raise _AgentExitError(error) from error
        finally:
            with self._lock:
                self._thread = None

    async def stop(self, task: "asyncio.Future[Any]") -> bool:
        """Cancel the agent's coroutine and interrupt its thread; return true if the agent ended in time."""
        # Both ways at once: a coroutine may be waiting for a thread that it started here.
        self._interrupt()
        task.cancel()
        waiting = {task} if self._future is None else {task, self._future}
        _, pending = await asyncio.wait(waiting, timeout=STOP_GRACE_S)
        return not pending

    def _interrupt(self) -> None:
        with self._lock:
            if self._thread is not None:
                # The only way to end a thread in Python; it acts at the thread's next bytecode, so
                # a call in C delays it.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread), ctypes.py_object(AttemptStopped)
                )


def _notice(future: "asyncio.Future[Any]") -> None:
    """Retrieve a stopped agent's exception, so that asyncio does not report it as never retrieved."""
    if not future.cancelled():
        # Marks it as retrieved.
        future.exception()


def _timeout_error(timeout_s: float | None, *, stopped: bool) -> ErrorInfo:
    text = f"the agent ran longer than {timeout_s:g} s and was stopped"
    if not stopped:
        text = (
            f"the agent ran longer than {timeout_s:g} s and did not stop when it was cancelled; its token is refused "
            "from now on. Use the 'process' runner, which kills what does not stop"
        )
    return ErrorInfo(type="TimeoutError", message=text)


def _read(
    status: AttemptStatus, error: ErrorInfo | None, value: Any, active: ActiveAttempt
) -> tuple[AttemptStatus, ErrorInfo | None, Json, tuple[Span, ...]]:
    """Interpret the agent's return value as status, error, output and reward spans.

    A value that is neither output nor reward fails the attempt.
    """
    if status != "succeeded":
        return status, error, None, ()
    try:
        result = read_result(value)
        rewards = () if result.reward is None else (reward_span(active, result.reward),)
    except (CaptureError, RunError) as wrong:
        return "failed", describe_error(wrong), None, ()
    return status, error, result.output, rewards


def reward_span(active: ActiveAttempt, reward: Reward) -> Span:
    """Make a span that carries a reward, with the current time, as a child of the attempt's root span."""
    return make_reward_span(
        active.rollout_id, active.attempt_id, reward, trace_id=active.trace_id, parent_id=active.root_span_id
    )


def _root_span(
    active: ActiveAttempt, started: int, status: AttemptStatus, error: ErrorInfo | None, output: Json
) -> Span:
    values: dict[str, Any] = {} if output is None else {semconv.OUTPUT: output}
    if error is not None:
        values[semconv.ERROR_TYPE] = error.type
    return Span(
        rollout_id=active.rollout_id,
        attempt_id=active.attempt_id,
        span_id=active.root_span_id,
        trace_id=active.trace_id,
        name=semconv.ROOT_SPAN_NAME,
        start_ns=started,
        end_ns=time.time_ns(),
        status="ok" if status == "succeeded" else "error",
        status_message="" if error is None else error.message,
        attributes=values,
    )


P = ParamSpec("P")
T = TypeVar("T")


class AgentThreads(Executor):
    """An executor that runs every call in a new daemon thread.

    An agent may block in a call that nothing can interrupt. A thread of a ``ThreadPoolExecutor`` would then delay the
    end of the process until that call returns.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Start ``fn`` at once; the caller has to limit the number of concurrent calls."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                value = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001  # raised where the result is asked for
                future.set_exception(error)
            else:
                future.set_result(value)

        # A daemon: the process may end although an agent never returns.
        threading.Thread(target=run, name="agl-agent", daemon=True).start()
        return future
