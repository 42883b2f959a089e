"""A child process of the `process` runner: runs one attempt at a time until its standard input ends.

The child's real standard output carries messages to the parent; the agent's output goes to standard error instead.
"""

import asyncio
import os
import sys
import threading
from typing import BinaryIO

import msgspec

from agl import PluginManager
from agl.contracts import Tracer
from agl.errors import AglError, RunError
from agl.schemas import Outcome
from agl.tracing import SpanRecorder
from agl_run.agents.agent import AgentSpec, LoadedAgent
from agl_run.agents.importing import load_tracers
from agl_run.messages import value_for_agent
from agl_run.runners.attempt import new_attempt, run_attempt
from agl_run.runners.connections import separate_loops
from agl_run.runners.pipe import ChildDone, ChildReady, ChildRun, ChildSpans, ChildStart, frame, read_to_child
from agl_run.runners.result import describe_error
from agl_run.runners.setup import client_environment, environment
from agl_run.runners.storable import fault_of, storable_outcome, storable_span

FLUSH_S = 1.0


def main() -> None:
    """Run the attempts that the parent sends, reading from standard input and writing to standard output."""
    # First, because output of the agent's imports must not be mixed with the messages.
    source, sink = _take_pipes()
    start = read_to_child(source)
    if not isinstance(start, ChildStart):
        return
    write = _Writer(sink)
    try:
        agent, tracers = _prepare(start)
    except BaseException as error:  # noqa: BLE001  # reported to the parent, which raises it there
        described = describe_error(error)
        is_ours = isinstance(error, AglError)
        write(frame(ChildReady(error=described.message if is_ours else f"{described.type}: {described.message}")))
        return
    # The parent waits for this, so that an agent which cannot be imported fails before the first
    # attempt.
    write(frame(ChildReady()))
    # After the import of the agent, which may make its clients, and before the first call.
    separate_loops()
    try:
        asyncio.run(_serve(source, write, start, agent, tracers))
    finally:
        for tracer in tracers:
            # Ends what tracers run in threads, so that the process can end.
            tracer.uninstall()


class _Writer:
    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink
        self._lock = threading.Lock()

    def __call__(self, data: bytes) -> None:
        # Spans are flushed from the loop while the outcome may be written.
        with self._lock:
            self._sink.write(data)
            self._sink.flush()


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    source = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    sink = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # A print of the agent, or of a library in C, goes to standard error from now on.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    return source, sink


def _prepare(start: ChildStart) -> tuple[LoadedAgent, list[Tracer]]:
    # The parent's path, so that modules next to a script or a notebook are found here as well.
    sys.path[:0] = [entry for entry in start.sys_path if entry not in sys.path]
    tracers = load_tracers(start.tracers, PluginManager.from_environment())
    return AgentSpec(path=start.agent_path, folder=start.folder).load(), tracers


async def _serve(
    source: BinaryIO, write: _Writer, start: ChildStart, agent: LoadedAgent, tracers: list[Tracer]
) -> None:
    while True:
        # In a thread, because a pipe cannot be awaited on every system; it blocks until the next
        # attempt.
        message = await asyncio.to_thread(read_to_child, source)
        if not isinstance(message, ChildRun):
            break
        recorder = SpanRecorder()
        resources = {name: value_for_agent(resource) for name, resource in message.resources.items()}
        active = new_attempt(
            message.rollout,
            message.attempt.attempt_id,
            recorder,
            token=message.token,
            gateway_url=start.gateway_url,
            upstreams=start.upstreams,
            tracers=tracers,
            replay=message.replay,
        )
        flusher = asyncio.create_task(_flush_loop(recorder, write))
        # Only one attempt runs here at a time, so its key can be in the environment of the process.
        with environment(_credentials(start, message.token)):
            outcome = await run_attempt(agent, message.rollout, active, resources=resources, recorder=recorder)
        # The flusher has ended before the outcome is sent, so no span of this attempt follows it.
        write(frame(ChildDone(outcome=_sendable(await _flushed(flusher, outcome)))))


def _credentials(start: ChildStart, token: str) -> dict[str, str]:
    """Return the environment variables that lead the agent's clients to the gateway; empty without a gateway."""
    return client_environment(f"{start.gateway_url}/v1", token) if start.gateway_url else {}


async def _flush_loop(recorder: SpanRecorder, write: _Writer) -> None:
    while True:
        await asyncio.sleep(FLUSH_S)
        # Made storable before they are sent, because the parent writes them unchecked.
        spans = tuple(map(storable_span, recorder.drain()))
        if spans:
            write(frame(ChildSpans(spans=spans)))


async def _flushed(flusher: "asyncio.Task[None]", outcome: Outcome) -> Outcome:
    """Stop the task that flushes spans, and return the outcome; if that task failed, the outcome is a failure."""
    flusher.cancel()
    (problem,) = await asyncio.gather(flusher, return_exceptions=True)
    if not isinstance(problem, Exception):
        return outcome
    return msgspec.structs.replace(outcome, status="failed", error=describe_error(problem))


def _sendable(outcome: Outcome) -> Outcome:
    fault = fault_of(outcome)
    if not fault:
        return outcome
    return storable_outcome(outcome, RunError(f"the attempt's outcome cannot be stored: {fault}")) or outcome


if __name__ == "__main__":
    main()
