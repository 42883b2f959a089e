"""Answers plain calls on a connection, at a fraction of the cost of aiohttp, and leaves the rest to aiohttp.

A call is plain if it is a small ``POST`` to an endpoint of a model or to a method of the store, with a
``Content-Length`` and with nothing in its head that HTTP allows and hardly any client sends. The check is a whitelist:
a request that departs from it in any byte goes to aiohttp with the whole connection, so that this module never decides
what an odd request means.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from email.utils import formatdate
from functools import lru_cache
from http.client import responses
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

_log = logging.getLogger("agl_gateway.http")

_SMALL = 128 * 1024
"""Bytes of the largest request that is read before its sender is verified; aiohttp reads as many."""

_MAX_HEAD = 8 * 1024
_WORD = rb"[\w~-][\w.~-]*+"
_HEAD = re.compile(
    rb"POST ((?:/v1|/rollout/%(word)b/attempt/%(word)b/key/%(word)b/v1)"
    rb"/(?:chat/completions|completions|responses|messages|embeddings)|/store/[a-z_]++)"
    rb"(?:\?([\w.~=&-]*+))? HTTP/1\.1\r\n"
    rb"((?:[\w!#$%%&'*+.^`|~-]++:[\t -~]*+\r\n)++)\r\n" % {b"word": _WORD},
    re.ASCII,
)
_LEFT_TO_AIOHTTP = frozenset(("transfer-encoding", "expect", "upgrade", "content-encoding", "trailer", "te"))
_BEGINNING = b"POST /"
_NO_BODY = (204, 304)


class CallRequest:
    """A plain call with its whole body; has the attributes of :class:`aiohttp.web.BaseRequest` that calls need.

    Attributes:
        headers: The headers by their names in lower case.
    """

    __slots__ = ("body", "connection", "headers", "path", "query", "query_string")

    method = "POST"

    def __init__(
        self, connection: "CallConnection", path: str, query_string: str, headers: dict[str, str], body: bytes
    ) -> None:
        self.connection = connection
        self.path = path
        self.query_string = query_string
        self.query: dict[str, str] = {}
        self.headers = headers
        self.body = body

    @property
    def transport(self) -> asyncio.Transport | None:
        """The connection to the client; ``None`` once it is lost."""
        return self.connection.transport

    @property
    def remote(self) -> str:
        """The client's address; ``""`` once the connection is lost."""
        peer: Any = "" if self.transport is None else self.transport.get_extra_info("peername", "")
        return peer if isinstance(peer, str) else str(peer[0])  # the path of a socket file, or an address and a port

    @property
    def content_type(self) -> str:
        """The media type without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


EitherRequest = web.BaseRequest | CallRequest
"""A call, as either server reads it."""


def read_call(connection: "CallConnection", received: bytes) -> tuple[CallRequest | None, int]:
    """Read the first request of the bytes that have arrived.

    Returns the request and its size in bytes. Without a request, the size is that of the bytes to wait for, or 0 for a
    request that is not plain.
    """
    end = received.find(b"\r\n\r\n", 0, _MAX_HEAD)
    if end < 0:
        is_begun = received[: len(_BEGINNING)] == _BEGINNING[: len(received)] and len(received) < _MAX_HEAD
        return None, len(received) + 1 if is_begun and received.count(b"\n") == received.count(b"\r\n") else 0
    found = _HEAD.match(received)
    if found is None or found.end() != end + 4:
        return None, 0
    path, query, lines = found.groups(b"")
    headers: dict[str, str] = {}
    fields = lines.decode().split("\r\n")[:-1]
    for field in fields:
        name, _, value = field.partition(":")
        headers[name.lower()] = value.strip(" \t")
    size = _body_size(headers) if len(headers) == len(fields) else -1
    start, size = end + 4, end + 4 + size
    if size < start or size > _SMALL:
        return None, 0
    if len(received) < size:
        return None, size
    return CallRequest(connection, path.decode(), query.decode(), headers, received[start:size]), size


def _body_size(headers: dict[str, str]) -> int:
    """Return the size of the body of a request with these headers; -1 if the request is not plain."""
    size = headers.get("content-length", "")
    is_plain = (
        "host" in headers
        and headers.keys().isdisjoint(_LEFT_TO_AIOHTTP)
        and headers.get("connection", "keep-alive").lower() == "keep-alive"
    )
    return int(size) if is_plain and size.isdecimal() and len(size) <= len(str(_SMALL)) else -1


class CallReply:
    """A streamed answer to a plain call; has the methods of :class:`aiohttp.web.StreamResponse` that calls need."""

    def __init__(self, connection: "CallConnection", status: int, headers: CIMultiDict[str]) -> None:
        self.status = status
        self._connection = connection
        self._head = _head(status, [*headers.items(), ("transfer-encoding", "chunked")])

    def send_head(self) -> None:
        """Send the head, unless it went with the first bytes of the body."""
        if head := self._taken():
            self._connection.send_now(head)

    async def write(self, data: bytes | bytearray) -> None:
        """Send the next bytes, and wait while the client has too many unread; raises ``ConnectionError``."""
        await self._connection.send(b"%b%x\r\n%b\r\n" % (self._taken(), len(data), data))

    async def write_eof(self) -> None:
        """Send the end of the body."""
        self._connection.is_reusable = True
        await self._connection.send(self._taken() + b"0\r\n\r\n")

    def _taken(self) -> bytes:
        head, self._head = self._head, b""
        return head


def new_reply(request: EitherRequest, status: int, headers: CIMultiDict[str]) -> "CallReply | web.StreamResponse":
    """Create a streamed answer to a request; :func:`begin` sends its head."""
    if isinstance(request, CallRequest):
        return CallReply(request.connection, status, headers)
    return web.StreamResponse(status=status, headers=headers)


async def begin(reply: "CallReply | web.StreamResponse", request: EitherRequest) -> None:
    """Begin to send ``reply`` to the sender of ``request``; bytes that are here already go with its head."""
    if isinstance(request, web.BaseRequest):
        assert not isinstance(reply, CallReply)  # noqa: S101  # as new_reply made it
        await reply.prepare(request)
    elif isinstance(reply, CallReply):
        asyncio.get_running_loop().call_soon(reply.send_head)


class CallConnection(asyncio.Protocol):
    """A client's connection that answers plain calls, one at a time, until another request comes.

    Args:
        answer: Answers a plain call; an answer that is a :class:`CallReply` was sent already.
        leave: Makes the protocol that takes the connection over with all other requests.
        on_end: Called once the connection is lost or left.
        first_s: Seconds that the first request may take to begin.
        part_s: Seconds after which a request that has not arrived whole is left to the other protocol.
        idle_s: Seconds between two requests after which the connection is closed.
    """

    def __init__(
        self,
        *,
        answer: "Callable[[CallRequest], Awaitable[web.StreamResponse | CallReply]]",
        leave: Callable[[], asyncio.Protocol],
        on_end: "Callable[[CallConnection], None]",
        first_s: float,
        part_s: float,
        idle_s: float,
    ) -> None:
        self._answer, self._leave, self._on_end = answer, leave, on_end
        self._first_s, self._part_s, self._idle_s = first_s, part_s, idle_s
        self._loop = asyncio.get_running_loop()
        self._received = b""
        self._wanted = 0
        self._is_partial = False
        self._deadline: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0
        self._drained: asyncio.Future[None] | None = None
        self._is_closing = False
        self.task: asyncio.Task[None] | None = None
        self.transport: asyncio.Transport | None = None
        self.is_reusable = False
        self._has_sent = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first request."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  # a stream's transport
        self.transport = transport
        self._start_deadline(self._first_s, transport.abort)
        self._idle_timer = self._loop.call_later(self._idle_s, self._check_idle)

    def data_received(self, data: bytes) -> None:
        """Answer the request if it has arrived; requests that come meanwhile wait."""
        self._received += data
        if self.task is None:
            if len(self._received) >= self._wanted:
                self._read()
        elif len(self._received) > _SMALL and self.transport is not None:
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        """Let writers wait until the client has read more."""
        self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        """Let writers go on."""
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the call that is being answered."""
        self._end()
        self.transport = None
        if self.task is not None:
            self.task.cancel()
        self.resume_writing()

    async def send(self, data: bytes) -> None:
        """Send bytes, and wait while the client has too many unread.

        Raises:
            ConnectionResetError: The client has disconnected.
        """
        if self.transport is None or self.transport.is_closing():
            raise ConnectionResetError("the client has disconnected")
        self.send_now(data)
        if self._drained is not None:
            await self._drained

    def send_now(self, data: bytes) -> None:
        """Send bytes, unless the client has disconnected."""
        self._has_sent = True
        if self.transport is not None:
            self.transport.write(data)

    def close(self) -> None:
        """Close the connection once the call that is being answered has its answer."""
        self._is_closing = True
        if self.task is None and self.transport is not None:
            self.transport.close()

    def _read(self) -> None:
        """Begin to answer the next request, wait for the rest of it, or leave the connection to the other protocol."""
        request, self._wanted = read_call(self, self._received)
        if request is not None:
            self._start_deadline(None)
            self._received, self._wanted, self._is_partial = self._received[self._wanted :], 0, False
            self.task = self._loop.create_task(self._respond(request))
        elif not self._wanted:
            self._hand_over()
        elif not self._is_partial:
            self._is_partial = True
            self._start_deadline(self._part_s, self._hand_over)

    async def _respond(self, request: CallRequest) -> None:
        """Answer one request, then begin with the next."""
        self.is_reusable = self._has_sent = False
        try:
            reply = await self._answer(request)
            if isinstance(reply, web.Response):
                self.is_reusable = True
                await self.send(_whole(reply))
        except ConnectionError:
            self.is_reusable = False
        except asyncio.CancelledError:
            if self.transport is not None:
                self.transport.abort()
            raise
        except Exception:  # noqa: BLE001  # isolation: one call's failure must not end the connection unanswered
            _log.exception("an error while answering a call")
            if not self._has_sent:
                self.send_now(_whole(web.Response(status=500, text="500: the gateway failed; see its log")))
        self.task = None
        if self.transport is None or self.transport.is_closing():
            return
        if self._is_closing or not self.is_reusable:
            self.transport.close()
            return
        self.transport.resume_reading()
        if self._received:
            self._read()
        else:
            self._idle_since = self._loop.time()

    def _hand_over(self) -> None:
        """Leave the connection, with the bytes that have arrived, to the other protocol."""
        transport, received = self.transport, self._received
        if transport is None:
            return
        self._end()
        self.transport, self._received = None, b""
        protocol = self._leave()
        protocol.connection_made(transport)
        transport.set_protocol(protocol)
        if received:
            protocol.data_received(received)

    def _start_deadline(self, delay_s: float | None, act: Callable[[], None] | None = None) -> None:
        """Replace the deadline of the request that arrives; there is none without ``act``."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if delay_s is None or act is None else self._loop.call_later(delay_s, act)

    def _check_idle(self) -> None:
        """Close the connection if it has been idle for too long, and look again later if not.

        One timer for a connection costs less than one for each request.
        """
        if self.transport is None:
            return
        left_s = self._idle_since + self._idle_s - self._loop.time()
        if self.task is None and not self._received and left_s <= 0:
            self.transport.close()
        else:
            self._idle_timer = self._loop.call_later(max(left_s, 1.0), self._check_idle)

    def _end(self) -> None:
        self._start_deadline(None)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._on_end(self)


def _whole(reply: web.Response) -> bytes:
    """Return a whole answer as bytes."""
    if reply.status in _NO_BODY:
        return _head(reply.status, reply.headers.items())
    body = reply.body if isinstance(reply.body, bytes) else b""
    reply.headers["content-length"] = str(len(body))
    return _head(reply.status, reply.headers.items()) + body


def _head(status: int, headers: Iterable[tuple[str, str]]) -> bytes:
    """Return the head of an answer; raises ``ValueError`` for a header of several lines."""
    lines = [f"{name}: {value}\r\n" for name, value in headers]
    text = f"HTTP/1.1 {status} {responses.get(status, '')}\r\n{''.join(lines)}date: {_date()}\r\n\r\n"
    if text.count("\n") != len(lines) + 3 or text.count("\r") != len(lines) + 3:
        raise ValueError("a header of the answer has a line break")
    return text.encode("latin-1", "replace")


def _date() -> str:
    return _date_at(int(time.time()))


@lru_cache(maxsize=1)
def _date_at(second: int) -> str:
    return formatdate(second, usegmt=True)
