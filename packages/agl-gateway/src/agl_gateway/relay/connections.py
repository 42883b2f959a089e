"""Connections that are closed when the headers of a request take too long to arrive."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

_GRACE_S = 0.5
"""Between the deadline and the end of a connection: an event loop that was busy reads here what had arrived in time."""


class Connection(web.RequestHandler):
    """One connection. Its deadline runs from the first byte of a request, or from the start, until a handler has it."""

    __slots__ = ("_deadline", "_headers_s", "_is_answering")

    def __init__(self, manager: web.Server, *, headers_s: float, **settings: Any) -> None:
        super().__init__(manager, loop=asyncio.get_running_loop(), **settings)
        self._headers_s = headers_s
        self._deadline: asyncio.TimerHandle | None = None
        self._is_answering = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first request."""
        super().connection_made(transport)
        self._start_deadline()

    def data_received(self, data: bytes) -> None:
        """Take bytes; those of a further request start its deadline."""
        super().data_received(data)
        if self._deadline is None and not self._is_answering:
            self._start_deadline()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the deadline."""
        self._stop_deadline()
        super().connection_lost(exc)

    async def answered(self, answer: Awaitable[web.StreamResponse]) -> web.StreamResponse:
        """Await the answer to a request whose headers have arrived."""
        self._stop_deadline()
        self._is_answering = True
        try:
            return await answer
        finally:
            self._is_answering = False

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log an error; one of the client, such as bytes that are no HTTP, does not fill the log."""
        is_of_client = isinstance(kw.get("exc_info"), HttpProcessingError)
        (self.logger.debug if is_of_client else self.logger.exception)(*args, **kw)

    def _start_deadline(self) -> None:
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._headers_s, self._on_deadline)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        self._deadline = asyncio.get_running_loop().call_later(_GRACE_S, self.force_close)


class ConnectionServer(web.Server):
    """An HTTP server whose connections have a deadline for headers.

    Args:
        handle: Answers requests.
        headers_s: Seconds that the headers of a request may take.
        settings: The rest, as :class:`aiohttp.web.Server` takes it for its connections.
    """

    def __init__(
        self, handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], *, headers_s: float, **settings: Any
    ) -> None:
        self._handle = handle
        self._headers_s = headers_s
        self._settings = settings
        super().__init__(self._answer, handler_cancellation=True)

    def __call__(self) -> Connection:
        """Make the connection for a client that connects."""
        return Connection(self, headers_s=self._headers_s, **self._settings)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, Connection)  # noqa: S101  # this server makes no others
        return await connection.answered(self._handle(request))
