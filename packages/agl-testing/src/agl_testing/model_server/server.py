"""The scripted model server: real sockets, its own thread and event loop, usable from sync and async tests."""

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType

from aiohttp import web

from agl_testing.model_server.handler import ScriptedHandler
from agl_testing.model_server.recording import RecordedCall, Recording
from agl_testing.model_server.script import Flavour, Reply, Respond, Script, Step
from agl_testing.model_server.thread import ThreadedServer


class ScriptedModelServer(ThreadedServer):
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
        super().__init__(host, port)
        self._script = Script(respond=respond, steps=steps, default=default)
        self._recording = Recording()
        self._handler = ScriptedHandler(
            script=self._script, recording=self._recording, flavour=flavour, models=models, api_key=api_key
        )

    @property
    def calls(self) -> list[RecordedCall]:
        """Every call that has arrived, in order."""
        return self._recording.snapshot()

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if error is None and self._handler.script_errors:
            raise self._handler.script_errors[0]

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[int]:
        """Listen with aiohttp, which cancels what is being answered when the block ends."""
        runner = web.ServerRunner(web.Server(self._handler.handle, handler_cancellation=True), shutdown_timeout=0.05)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port).start()
            yield int(runner.addresses[0][1])
        finally:
            await runner.cleanup()
