"""Serves HTTP: plain calls by :class:`CallConnection`, all else by aiohttp, on the same port.

Connections on which a request's headers take too long to arrive are closed.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from agl_gateway.wire.http.calls import CallConnection, CallReply, CallRequest

_PART_S = 0.5
"""Seconds that a plain call may take to arrive whole before its connection is left to aiohttp."""

_GRACE_S = 0.5
"""Seconds between a header deadline and the close of the connection.

They let a busy event loop read data that arrived in time.
"""


class Connection(web.RequestHandler):
    """One connection with a deadline for headers.

    The deadline runs from the connection's start or a later request's first byte until a handler gets the request.
    """

    __slots__ = ("_deadline", "_headers_s", "_is_answering")

    def __init__(self, manager: web.Server, *, headers_s: float, **settings: Any) -> None:
        super().__init__(manager, loop=asyncio.get_running_loop(), **settings)
        self._headers_s = headers_s
        self._deadline: asyncio.TimerHandle | None = None
        self._is_answering = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the deadline for the headers of the first request."""
        super().connection_made(transport)
        self._start_deadline()

    def data_received(self, data: bytes) -> None:
        """Receive bytes; the first bytes of a later request start the deadline for its headers."""
        super().data_received(data)
        if self._deadline is None and not self._is_answering:
            self._start_deadline()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Cancel the deadline for headers."""
        self._stop_deadline()
        super().connection_lost(exc)

    async def answered(self, answer: Awaitable[web.StreamResponse]) -> web.StreamResponse:
        """Await the answer to a request whose headers have arrived; no deadline runs meanwhile."""
        self._stop_deadline()
        self._is_answering = True
        try:
            return await answer
        finally:
            self._is_answering = False

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log an error with traceback, or at debug level if the client caused it, such as bytes that are not HTTP."""
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
        handle_call: Answers plain calls.
        headers_s: Seconds that the headers of a request may take.
        keepalive_s: Seconds for which an idle connection is kept.
        settings: Other settings of aiohttp's connections, as for :class:`aiohttp.web.Server`.
    """

    def __init__(
        self,
        handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        handle_call: Callable[[CallRequest], Awaitable[web.StreamResponse | CallReply]],
        *,
        headers_s: float,
        keepalive_s: float,
        **settings: Any,
    ) -> None:
        self._handle, self._handle_call = handle, handle_call
        self._headers_s, self._keepalive_s = headers_s, keepalive_s
        self._settings = settings
        self._calling: set[CallConnection] = set()
        super().__init__(self._answer, handler_cancellation=True)

    def __call__(self) -> CallConnection:  # type: ignore[override]  # the base class's makes the protocol of `leave`
        """Create a connection for a new client."""
        connection = CallConnection(
            answer=self._handle_call,
            leave=self._left,
            on_end=self._calling.discard,
            first_s=self._headers_s + _GRACE_S,
            part_s=_PART_S,
            idle_s=self._keepalive_s,
        )
        self._calling.add(connection)
        return connection

    def pre_shutdown(self) -> None:
        """Close idle connections."""
        super().pre_shutdown()
        for connection in [*self._calling]:
            connection.close()

    async def shutdown(self, timeout: float | None = None) -> None:
        """Wait up to ``timeout`` seconds for the calls that are being answered, then cancel them."""
        tasks = [connection.task for connection in self._calling if connection.task is not None]
        aiohttps = asyncio.create_task(super().shutdown(timeout))
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for connection in [*self._calling]:
            connection.close()
        await aiohttps

    def _left(self) -> Connection:
        return Connection(self, headers_s=self._headers_s, keepalive_timeout=self._keepalive_s, **self._settings)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, Connection)  # noqa: S101  # this server makes no others
        return await connection.answered(self._handle(request))
