"""A server in a thread and an event loop of its own, so that synchronous and asynchronous tests use it alike."""

import asyncio
import threading
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self

HOST = "127.0.0.1"
_START_LIMIT_S = 10.0


class ThreadedServer:
    """Serves on a local port from :meth:`start` to :meth:`stop`, or within a ``with`` block.

    Args:
        port: A port of this machine, which no other machine reaches; 0 for any free one.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._failure: OSError | None = None

    @property
    def url(self) -> str:
        """Root of the server, which Anthropic clients take as their base URL."""
        return f"http://{HOST}:{self._port}"

    @property
    def base_url(self) -> str:
        """The root with ``/v1``, which OpenAI clients take as their base URL."""
        return f"{self.url}/v1"

    def listening(self) -> AbstractAsyncContextManager[int]:
        """Listen for the length of a block, which gets the port; raises :class:`OSError` if it is taken."""
        raise NotImplementedError

    def start(self) -> Self:
        """Bind the port and serve; returns when calls are accepted."""
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name=type(self).__name__, daemon=True)
        self._thread.start()
        if not started.wait(_START_LIMIT_S):
            raise TimeoutError(f"the {type(self).__name__} did not start within {_START_LIMIT_S} s")
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

    async def serve(self, started: threading.Event) -> None:
        """Serve until :meth:`stop`; sets ``started`` once the port is open. Raises :class:`OSError` if it is taken."""
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        async with self.listening() as self._port:
            started.set()
            await self._stopping.wait()

    def _run(self, started: threading.Event) -> None:
        try:
            asyncio.run(self.serve(started))
        except OSError as error:
            self._failure = error
            started.set()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
