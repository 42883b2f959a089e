"""The scripted model server, with a real port and an event loop in its own thread, for sync and async tests."""

import asyncio
import socket
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from aiohttp import web

from agl_testing.model_server.handler import RecordedCall, ScriptedHandler
from agl_testing.model_server.script import Flavour, ModelRequest, Reply, Respond, Status, Step

_HOST = "127.0.0.1"
_START_LIMIT_S = 10.0


class ScriptedModelServer:
    """A model API on a local port that answers by a script.

    >>> with ScriptedModelServer([Reply(text="hello")]) as server:
    ...     client = openai.OpenAI(base_url=server.base_url, api_key="any")

    Args:
        steps: Replies and faults to queue; each call, in order of arrival, takes the next.
        respond: A function that returns the step for a request; if given, it answers every call instead of the queue.
        default: The answer when the queue is empty; ``None`` for an HTTP 500.
        flavour: The server to imitate in returning token ids.
        models: Names that ``/v1/models`` lists; the first is used if a request names no model.
        api_key: The key that calls must have, or else get a 401; ``None`` to accept all calls.
        port: The port; 0 for any free one.

    Entering the context, or calling :meth:`start`, starts the server. Leaving the context, or calling :meth:`stop`,
    stops it and ends all calls, even stalled ones. Leaving the context also raises the first error of the script.
    All methods may be called from any thread.
    """

    def __init__(
        self,
        steps: Iterable[Step] = (),
        *,
        respond: Respond | None = None,
        default: Reply | None = Reply(text="ok"),  # noqa: B008  # frozen
        flavour: Flavour = "vllm",
        models: Sequence[str] = ("scripted",),
        api_key: str | None = None,
        port: int = 0,
    ) -> None:
        self._port = port
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._failure: OSError | None = None
        self._respond, self._steps, self._default = respond, deque(steps), default
        self._calls: list[RecordedCall] = []
        self._arrived = threading.Condition()
        self._handler = ScriptedHandler(
            next_step=self._next_step,
            record=self._record,
            default=default,
            flavour=flavour,
            models=models,
            api_key=api_key,
        )

    @property
    def url(self) -> str:
        """The server's root URL, the base URL for Anthropic's clients."""
        return f"http://{_HOST}:{self._port}"

    @property
    def base_url(self) -> str:
        """The root URL with ``/v1``, the base URL for OpenAI's clients."""
        return f"{self.url}/v1"

    def start(self) -> Self:
        """Start the thread and serve; returns once the server accepts calls.

        Raises:
            OSError: The port is in use.
            TimeoutError: The server did not start in time.
        """
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="ScriptedModelServer", daemon=True)
        self._thread.start()
        if not started.wait(_START_LIMIT_S):
            raise TimeoutError(f"the ScriptedModelServer did not start within {_START_LIMIT_S} s")
        if self._failure is not None:
            raise self._failure
        return self

    def stop(self) -> None:
        """Close the port and all connections, including those of stalled calls; idempotent."""
        if self._thread is None:
            return
        if self._loop is not None and self._stopping is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()
        self._thread = None

    @property
    def calls(self) -> list[RecordedCall]:
        """All calls that have arrived, in order."""
        return list(self._calls)

    def enqueue(self, *steps: Step) -> None:
        """Queue further steps."""
        self._steps.extend(steps)

    def respond_with(self, respond: Respond | None) -> None:
        """Answer all later calls with ``respond``; ``None`` returns to the queue."""
        self._respond = respond

    def clear_calls(self) -> None:
        """Remove all recorded calls."""
        self._calls.clear()

    def wait_for_calls(self, count: int, *, timeout: float = 10.0) -> list[RecordedCall]:
        """Block until ``count`` calls have arrived, and return them; raises :class:`TimeoutError` after ``timeout``."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: len(self._calls) >= count, timeout):
                raise TimeoutError(f"{len(self._calls)} of {count} calls reached the server within {timeout} s")
            return list(self._calls)

    def _record(self, call: RecordedCall) -> None:
        with self._arrived:
            self._calls.append(call)
            self._arrived.notify_all()

    def _next_step(self, request: ModelRequest) -> Step:
        """Return the step for a request; if the script has no step left, return the default or an HTTP 500."""
        if self._respond is not None:
            return self._respond(request)
        if self._steps:
            return self._steps.popleft()
        return self._default or Status(
            code=500, message=f"the script has no step for call {request.index}; enqueue one more"
        )

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if error is None and self._handler.script_errors:
            raise self._handler.script_errors[0]

    def _run(self, started: threading.Event) -> None:
        try:
            asyncio.run(self._serve(started))
        except OSError as error:
            self._failure = error
            started.set()

    async def _serve(self, started: threading.Event) -> None:
        """Serve until :meth:`stop`, which cancels calls in progress; sets ``started`` once the port is open."""
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        runner = web.ServerRunner(web.Server(self._handler.handle, handler_cancellation=True), shutdown_timeout=0.05)
        await runner.setup()
        try:
            listening = socket.create_server((_HOST, self._port))
            await web.SockSite(runner, listening).start()
            self._port = listening.getsockname()[1]
            started.set()
            await self._stopping.wait()
            with suppress(NotImplementedError):  # a loop of Windows has no readers
                self._loop.remove_reader(listening)  # a connection accepted in the turn of the close is never closed
            await asyncio.sleep(0)
        finally:
            await runner.cleanup()
