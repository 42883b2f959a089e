"""The base of servers that run an event loop in their own thread, so that sync and async tests use them alike."""

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
        port: A port on the loopback interface; 0 for any free port.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._failure: OSError | None = None

    @property
    def url(self) -> str:
        """The server's root URL, the base URL for Anthropic's clients."""
        return f"http://{HOST}:{self._port}"

    @property
    def base_url(self) -> str:
        """The root URL with ``/v1``, the base URL for OpenAI's clients."""
        return f"{self.url}/v1"

    def listening(self) -> AbstractAsyncContextManager[int]:
        """Return a context that listens while open and yields the port; raises :class:`OSError` if it is in use."""
        raise NotImplementedError

    def start(self) -> Self:
        """Start the thread and serve; returns once the server accepts calls.

        Raises:
            OSError: The port is in use.
            TimeoutError: The server did not start in time.
        """
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name=type(self).__name__, daemon=True)
        self._thread.start()
        if not started.wait(_START_LIMIT_S):
            raise TimeoutError(f"the {type(self).__name__} did not start within {_START_LIMIT_S} s")
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

    async def serve(self, started: threading.Event) -> None:
        """Serve until :meth:`stop`; sets ``started`` once the port is open. Raises :class:`OSError` if it is in use."""
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
