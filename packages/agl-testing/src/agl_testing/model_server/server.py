"""The scripted model server: real sockets, its own thread and event loop, usable from sync and async tests."""

import asyncio
import threading
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from aiohttp import web

from agl_testing.model_server.handler import ScriptedHandler
from agl_testing.model_server.recording import RecordedCall, Recording
from agl_testing.model_server.script import Flavour, Reply, Respond, Script, Step

_START_LIMIT_S = 10.0


class ScriptedModelServer:
    """A model API on a local port that says what a script tells it to say.

    >>> with ScriptedModelServer([Reply(text="hello")]) as server:
    ...     client = openai.OpenAI(base_url=server.base_url, api_key="any")

    Args:
        steps: Queued replies and faults, one per call, in order of arrival.
        respond: A function from request to step; it then answers every call.
        default: The answer when the queue is empty; ``None`` for an HTTP 500.
        flavour: The server to imitate in returning token ids.
        models: Names that ``/v1/models`` lists; the first is assumed where a request names none.
        api_key: If given, calls without it get a 401.
        host: Address to bind.
        port: 0 for any free one.

    The server starts on entering the context (or by :meth:`start`) and is gone, stalled calls included, on
    leaving it (or by :meth:`stop`); leaving also raises what a ``respond`` function raised.
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
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._script = Script(respond=respond, steps=steps, default=default)
        self._recording = Recording()
        self._handler = ScriptedHandler(
            script=self._script, recording=self._recording, flavour=flavour, models=models, api_key=api_key
        )
        self._host = host
        self._port = port
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping: asyncio.Event | None = None
        self._failure: OSError | None = None

    @property
    def url(self) -> str:
        """Root of the server, which Anthropic clients take as their base URL."""
        return f"http://{self._host}:{self._port}"

    @property
    def base_url(self) -> str:
        """The root with ``/v1``, which OpenAI clients take as their base URL."""
        return f"{self.url}/v1"

    @property
    def calls(self) -> list[RecordedCall]:
        """Every call that has arrived, in order."""
        return self._recording.snapshot()

    @property
    def steps_left(self) -> int:
        """The number of queued steps that no call has used."""
        return self._script.steps_left

    def enqueue(self, *steps: Step) -> None:
        """Queue further steps."""
        self._script.enqueue(*steps)

    def respond_with(self, respond: Respond | None) -> None:
        """Answer all later calls with ``respond``; ``None`` goes back to the queue."""
        self._script.respond_with(respond)

    def clear_calls(self) -> None:
        """Forget the calls that were recorded."""
        self._recording.clear()

    def wait_for_calls(self, count: int, *, timeout: float = 10.0) -> list[RecordedCall]:
        """Block until ``count`` calls have arrived; :class:`TimeoutError` says how many did."""
        return self._recording.wait_for(count, timeout=timeout)

    def start(self) -> Self:
        """Bind the port and serve; returns when calls are accepted."""
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="scripted-model-server", daemon=True)
        self._thread.start()
        if not started.wait(_START_LIMIT_S):
            raise TimeoutError(f"the scripted model server did not start within {_START_LIMIT_S} s")
        if self._failure is not None:
            raise self._failure
        return self

    def stop(self) -> None:
        """Close the port and every connection, stalled calls included; idempotent."""
        if self._thread is None:
            return
        if self._loop is not None and self._stopping is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()
        self._thread = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if error is None and self._handler.script_errors:
            raise self._handler.script_errors[0]

    def _run(self, started: threading.Event) -> None:
        asyncio.run(self._serve(started))

    async def _serve(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        runner = web.ServerRunner(web.Server(self._handler.handle, handler_cancellation=True), shutdown_timeout=0.05)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self._host, self._port)
            await site.start()
            self._port = _port_of(runner)
            started.set()
            await self._stopping.wait()
        except OSError as error:
            self._failure = error
            started.set()
        finally:
            await runner.cleanup()


def _port_of(runner: web.ServerRunner) -> int:
    return int(runner.addresses[0][1])
