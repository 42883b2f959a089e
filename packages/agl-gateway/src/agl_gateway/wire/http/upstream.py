"""Asks servers over connections that are used again, at a fraction of the cost of aiohttp's client.

Redirects, cookies and proxies are left out. An answer is decompressed by the caller.
"""

import asyncio
import ssl
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import httptools
from aiohttp import BasicAuth
from multidict import CIMultiDict
from yarl import URL

CONNECT_S = 10.0
KEEPALIVE_S = 4.0
"""Seconds for which an idle connection is kept: less than the 5 after which uvicorn, and so vLLM, closes it."""

_MAX_HEAD = 64 * 1024
_MAX_UNREAD = 256 * 1024
"""Bytes of an answer that may wait for their reader before no more are received."""

_PART = 256 * 1024
"""Bytes of a request that are sent at once, so that the event loop serves other requests in between."""

_FIRST_FINAL = 200


class UnreachableError(Exception):
    """Raised if no connection to a server can be opened; nothing was sent."""


class SilentConnectError(TimeoutError):
    """Raised if a server does not take a connection in time; nothing was sent."""


class BrokenAnswerError(ConnectionError):
    """Raised if an answer is not HTTP, or its connection ends before it does."""


class Body:
    """The bytes of an answer as they arrive; the connection stops receiving while too many are unread."""

    def __init__(self, connection: "_Connection") -> None:
        self._connection = connection
        self._parts: list[bytes] = []
        self._unread = 0

    async def readany(self) -> bytes:
        """Return the bytes that have arrived since the last call, after a wait for some; ``b""`` at the end.

        Raises:
            TimeoutError: The server was silent for too long.
            BrokenAnswerError: The connection ended before the answer.
        """
        while not self._parts:
            if self._connection.is_answered:
                return b""
            await self._connection.wait()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        if self._unread > _MAX_UNREAD:
            self._connection.resume()
        self._unread = 0
        return data

    def feed(self, data: bytes) -> None:
        """Add the next bytes."""
        self._parts.append(data)
        self._unread += len(data)
        if self._unread > _MAX_UNREAD:
            self._connection.pause()


@dataclass(eq=False, kw_only=True)
class Response:
    """An answer of which the head has arrived; has what calls need of :class:`aiohttp.ClientResponse`."""

    status: int
    headers: CIMultiDict[str]
    content: Body
    connection: "_Connection"

    @cached_property
    def content_type(self) -> str:
        """The media type without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    def close(self) -> None:
        """Give the connection to the next request, or end it if the answer has not arrived whole; idempotent."""
        self.connection.release(self)


class _Connection(asyncio.Protocol):
    """One connection to a server, for one request at a time."""

    def __init__(self, pool: "Pool", idle: "list[_Connection]") -> None:
        self._pool, self._idle = pool, idle
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._last = 0.0
        self._is_paused = False
        self._is_busy = False
        self._begin()

    def _begin(self) -> None:
        """Forget the last answer."""
        self._parser = httptools.HttpResponseParser(self)
        self._response: Response | None = None
        self._fields: list[tuple[str, str]] = []
        self._head_size = 0
        self._ends_by_close = self._is_kept_open = self._is_sent = False
        self.is_answered = False

    @property
    def is_usable(self) -> bool:
        """True if another request can be sent."""
        is_fresh = self._loop.time() - self._last < KEEPALIVE_S
        return is_fresh and self._transport is not None and not self._transport.is_closing()

    async def ask(self, head: bytes, body: bytes) -> Response:
        """Send a request; returns the answer once its head has arrived."""
        assert self._transport is not None  # noqa: S101  # the pool gives out open connections only
        self._begin()
        self._is_busy, self._last = True, self._loop.time()
        try:
            if len(body) <= _PART:
                self._transport.write(head + body)
                self._is_sent = True
            else:
                await self._send_in_parts(head, memoryview(body))
            while self._response is None:
                await self.wait()
        except BaseException:
            self.abort()
            raise
        return self._response

    async def _send_in_parts(self, head: bytes, body: memoryview) -> None:
        """Send a large request, until the server answers early or ends the connection."""
        assert self._transport is not None  # noqa: S101
        self._transport.write(head)
        for start in range(0, len(body), _PART):
            if self._response is not None or self._error is not None:
                return
            self._transport.write(body[start : start + _PART])
            self._last = self._loop.time()
            await (asyncio.sleep(0) if self._drained is None else self._drained)
        self._is_sent = True

    async def wait(self) -> None:
        """Wait until something has arrived; raises the error that ended the connection."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None and not self.is_answered:
            raise self._error

    def pause(self) -> None:
        """Receive nothing until :meth:`resume`."""
        if self._transport is not None and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Receive again."""
        if self._transport is not None and self._is_paused:
            self._is_paused, self._last = False, self._loop.time()
            self._transport.resume_reading()

    def release(self, response: Response) -> None:
        """Keep the connection for the next request, unless ``response`` or the request was not sent whole."""
        if self._response is not response or not self._is_busy:
            return
        self._is_busy = False
        is_whole = self._is_sent and self.is_answered and self._is_kept_open and self.is_usable
        if not is_whole or self._transport is None or self._transport.get_write_buffer_size():
            self.abort()
        else:
            self.resume()
            self._idle.append(self)

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  # a stream's transport
        self._transport = transport
        self._timer = self._loop.call_later(self._pool.look_s, self._look)

    def data_received(self, data: bytes) -> None:
        self._last = self._loop.time()
        if not self._is_busy:
            self.abort()  # bytes that no request asked for would be taken for the next answer
            return
        if self._response is None:
            self._head_size += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(BrokenAnswerError(f"the answer is not HTTP/1.1: {error}"))
            self.abort()
        else:
            if self._response is None and self._head_size > _MAX_HEAD:
                self._fail(BrokenAnswerError(f"the answer has a head of more than {_MAX_HEAD} bytes"))
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        if self._ends_by_close and exc is None:
            self.is_answered = True
        self._fail(BrokenAnswerError(str(exc) if exc else "the server closed the connection"))
        self.resume_writing()
        if self in self._idle:
            self._idle.remove(self)

    def pause_writing(self) -> None:
        self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    # the parser's side

    def on_message_begin(self) -> None:
        if self.is_answered:
            raise httptools.HttpParserError("bytes follow the answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._response is None:  # else it is a trailer
            self._fields.append((name.decode("latin-1"), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < _FIRST_FINAL:
            return
        headers = CIMultiDict(self._fields)
        self._is_kept_open = self._parser.should_keep_alive()  # which the parser forgets at the end of the answer
        self._ends_by_close = "content-length" not in headers and "transfer-encoding" not in headers
        self._response = Response(status=status, headers=headers, content=Body(self), connection=self)

    def on_body(self, body: bytes) -> None:
        if self._response is not None:
            self._response.content.feed(body)

    def on_message_complete(self) -> None:
        if self._response is None:  # an interim answer, such as 103
            self._fields.clear()
        else:
            self.is_answered = True

    def _look(self) -> None:
        """End a request whose server is silent, and a connection that is idle for too long; then look again later."""
        now = self._loop.time()
        if self._is_busy and not self._is_paused and now - self._last >= self._pool.timeout_s:
            self._fail(TimeoutError("the server is silent"))
            self.abort()
        elif not self._is_busy and now - self._last >= KEEPALIVE_S:
            self.abort()
        else:
            self._timer = self._loop.call_later(self._pool.look_s, self._look)

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        self._wake()

    def abort(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(eq=False, kw_only=True)
class Pool:
    """Connections to servers. Used in one event loop only.

    Attributes:
        timeout_s: Seconds for which a server may be silent while it answers.
    """

    timeout_s: float
    _idle: defaultdict[tuple[str, str], list[_Connection]] = field(
        default_factory=lambda: defaultdict(list[_Connection]), init=False
    )

    @cached_property
    def look_s(self) -> float:
        """Seconds between two looks at a connection."""
        return min(self.timeout_s, KEEPALIVE_S)

    @cached_property
    def _context(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Response:
        """Send a request; returns the answer once its head has arrived, for the caller to read or close.

        Raises:
            UnreachableError: No connection can be opened.
            TimeoutError: The server is silent for too long; a :class:`SilentConnectError` if nothing was sent.
            BrokenAnswerError: The connection ended before the answer's head.
        """
        address = URL(url)
        if address.user and "authorization" not in CIMultiDict(headers):
            headers = {**headers, "authorization": BasicAuth(address.user, address.password or "").encode()}
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        head = f"POST {address.raw_path_qs} HTTP/1.1\r\nhost: {address.host_port_subcomponent}\r\n{lines}"
        if head.count("\n") != len(headers) + 2 or head.count("\r") != len(headers) + 2:
            raise ValueError("a header of the request has a line break")
        connection = await self._connection(address)
        return await connection.ask(f"{head}content-length: {len(body)}\r\n\r\n".encode("utf-8", "replace"), body)

    def close(self) -> None:
        """Close all idle connections."""
        for idle in self._idle.values():
            for connection in [*idle]:
                connection.abort()
            idle.clear()

    async def _connection(self, address: URL) -> _Connection:
        """Return an idle connection, or a new one."""
        idle = self._idle[address.scheme, address.host_port_subcomponent or ""]
        while idle:
            if (connection := idle.pop()).is_usable:
                return connection
            connection.abort()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self, idle),
                    address.raw_host or "",
                    address.port or 0,
                    ssl=self._context if address.scheme == "https" else None,
                    happy_eyeballs_delay=0.25,
                )
        except TimeoutError as error:
            raise SilentConnectError(f"no connection within {CONNECT_S:.0f} s") from error
        except (OSError, UnicodeError) as error:
            raise UnreachableError(f"cannot connect to {address.host_port_subcomponent}: {error}") from error
        return connection
