"""Reads request bodies within limits: on size, on time, on the bytes held at once, and on the number of JSON values.

The HTTP server decompresses nothing, so a body costs no more than its own bytes before its sender is verified. Bodies
are decompressed piece by piece in threads, so that a small body that grows without end is refused before it fills the
memory.
"""

import asyncio
import time
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import zstandard
from aiohttp import StreamReader, web
from multidict import MultiMapping

from agl_gateway.wire.http.calls import EitherRequest
from agl_gateway.wire.problems import Problem

_RETRY_AFTER_S = 5


class ByteBudget:
    """A limit on the bytes that requests hold at once; requests are served in order. Used in one event loop only.

    Args:
        limit: Bytes that may be held at once.
        wait_s: Seconds that a request waits for its bytes.
    """

    def __init__(self, *, limit: int, wait_s: float) -> None:
        self.limit = limit
        self._wait_s = wait_s
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.held = 0

    async def take(self, size: int) -> int:
        """Take ``size`` bytes from the budget, or the whole budget if that is less, and wait until they are free.

        Returns the number of bytes taken.

        Raises:
            Problem: 503 with ``Retry-After`` if the bytes are not free in time.
        """
        size = min(size, self.limit)
        if not self._waiting and self.held + size <= self.limit:
            self.held += size
            return size
        granted = asyncio.get_running_loop().create_future()
        self._waiting.append((size, granted))
        try:
            async with asyncio.timeout(self._wait_s):
                await granted
        except BaseException as error:
            self._withdraw(size, granted)
            if isinstance(error, TimeoutError):
                raise Problem(
                    503,
                    f"large requests hold {self.held} of {self.limit} bytes that the gateway keeps for them; send "
                    "fewer at once, or smaller ones, or try again later",
                    code="overloaded",
                    is_retryable=True,
                    retry_after_s=_RETRY_AFTER_S,
                ) from None
            raise
        return size

    def give(self, size: int) -> None:
        """Give ``size`` bytes back to the budget, and grant them to waiting requests; below 0, hold more at once."""
        self.held -= size
        while self._waiting and self.held + self._waiting[0][0] <= self.limit:
            wanted, granted = self._waiting.popleft()
            if not granted.done():
                self.held += wanted
                granted.set_result(None)

    def _withdraw(self, size: int, granted: "asyncio.Future[None]") -> None:
        if granted.done() and not granted.cancelled():
            self.give(size)
        else:
            self._waiting = deque(item for item in self._waiting if item[1] is not granted)
            self.give(0)


ENCODINGS = ("gzip", "x-gzip", "deflate", "zstd")
"""Content encodings of requests that the gateway reads."""

READABLE = "gzip, deflate or zstd"
INFLATE_ERRORS = (zlib.error, zstandard.ZstdError)
"""Errors of bytes that are not in the encoding that their header names."""

_STEP, _PIECE = 64 * 1024, 256 * 1024
_GZIP, _ZLIB, _RAW = 31, 15, -15

_ZSTD_STEP = 1024
"""Bytes of a zstd stream that are decompressed in one step; they become 32 MiB at most."""

_ZSTD_WINDOW = 8 * 1024 * 1024
"""The largest accepted zstd window, in bytes; decoders of web content have to support this size (RFC 8878)."""


def largest(size: int, encoding: str) -> int:
    """Return the maximum size, in bytes, to which a compressed body of ``size`` bytes can expand.

    Deflate expands at most 1,032 times. A zstd block decompresses to 128 KiB at most, and takes at least 4 bytes.
    """
    return size * (32 * 1024 if encoding == "zstd" else 1032)


def inflate(body: bytes, encoding: str, limit: int) -> bytes:
    """Return the decompressed body.

    Raises:
        Problem: 413 as soon as the decompressed bytes exceed ``limit``; 400 if the body cannot be read, or is not
            exactly one stream.
    """
    inflater, pieces, left = Inflater(encoding), list[bytes](), limit
    try:
        for piece in chain(inflater.feed(body), inflater.end()):
            left -= len(piece)
            if left < 0:
                raise too_large(limit)
            pieces.append(piece)
    except INFLATE_ERRORS as error:
        raise Problem(
            400,
            f"the request's body cannot be read as content-encoding {encoding!r}; send what the header says, or no "
            "content-encoding",
            code="invalid_encoding",
        ) from error
    return b"".join(pieces)


def too_large(limit: int) -> Problem:
    """Return the 413 for a body of more than ``limit`` bytes."""
    return Problem(
        413, f"the request's body is larger than {limit} bytes; send it in smaller parts", code="request_too_large"
    )


class Inflater:
    """Decompresses one gzip, deflate or zstd stream, whose bytes may arrive in parts.

    Its methods yield small pieces, so that no thread waits long. They raise one of :data:`INFLATE_ERRORS` if the bytes
    are not exactly one stream of the encoding.

    Args:
        is_series: Accept gzip streams in several members (RFC 1952, section 2.2).
    """

    def __init__(self, encoding: str, *, is_series: bool = False) -> None:
        self._is_series = is_series
        self._zstd = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()
        self._zlib = zlib.decompressobj(_ZLIB if encoding == "deflate" else _GZIP)
        self._encoding = encoding
        self._has_begun = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the decompressed form of the next bytes of the stream."""
        if data and not self._has_begun:
            self._has_begun = True
            if self._encoding == "deflate" and data[0] & 0x0F != 8:  # some senders leave zlib's header out
                self._zlib = zlib.decompressobj(_RAW)
        view, step = memoryview(data), _ZSTD_STEP if self._encoding == "zstd" else _STEP
        for start in range(0, len(view), step):
            sent: bytes | memoryview = view[start : start + step]
            if self._encoding == "zstd":
                if self._zstd.eof:
                    raise zlib.error("bytes follow its end")
                yield self._zstd.decompress(sent)
                continue
            while len(sent):
                if self._zlib.eof and not self._is_series:
                    raise zlib.error("bytes follow its end")
                if self._zlib.eof:
                    self._zlib = zlib.decompressobj(_GZIP)
                yield self._zlib.decompress(sent, _PIECE)
                sent = self._zlib.unconsumed_tail or self._zlib.unused_data

    def end(self) -> Iterator[bytes]:
        """Yield the last bytes of the stream, unless it is empty."""
        if not self._has_begun:
            return
        if self._encoding != "zstd":
            yield self._zlib.flush()
        if not (self._zlib.eof or self._zstd.eof):
            raise zlib.error("it breaks off")
        if self._zstd.unused_data:
            raise zlib.error("bytes follow its end")


MAX_CONTAINERS = 200_000
MAX_VALUES = 4_000_000
"""The largest number of values in a JSON body, more than prompts of token ids have.

A parser creates an object for each value, and blocks its thread meanwhile.
"""

PIECE = 1 << 18
"""Bytes of a JSON body that are checked before the event loop gets a turn."""


async def check_values(body: bytes) -> None:
    """Check a JSON body before it is parsed, piece by piece, so that other requests are answered meanwhile.

    Raises:
        Problem: 413 if the body has more than 200,000 lists and objects, or more than 4,000,000 values.
    """
    if len(body) <= MAX_CONTAINERS:
        return
    containers = values = quotes = 0
    for piece in _pieces(body):
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[quotes % 2 :: 2])
        containers += outside.count(b"[") + outside.count(b"{")
        values += outside.count(b",")
        quotes += len(parts) - 1
        if containers > MAX_CONTAINERS or max(values, quotes // 2) > MAX_VALUES:
            raise Problem(
                413,
                f"the request has more than {MAX_CONTAINERS:,} lists and objects, or more than {MAX_VALUES:,} values; "
                "send less at once",
                code="too_many_values",
            )
        await asyncio.sleep(0)


def _pieces(body: bytes) -> Iterator[bytes]:
    """Cut a body into pieces, never between a backslash and the character that it escapes."""
    start = 0
    while start < len(body):
        piece = body[start : start + PIECE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = body[start : start + PIECE + 1]
        yield piece
        start += len(piece)


_INFLATING = 2
"""How many bodies are decompressed at once; each may take as much memory as the limit of its endpoint."""

LARGE = 1024 * 1024
"""Size in bytes from which a body counts in the budget, and is not worked on in the event loop."""

_MIN_RATE = 64 * 1024
"""The slowest rate, in bytes per second, at which a body may arrive."""


class BodyReader:
    """Reads the bodies of one gateway's requests, after their senders were verified. Close it to end its threads.

    Args:
        patience_s: Seconds that a body may take to arrive, plus one for every 64 KiB.
        budget: Bytes for all bodies that exceed 1 MiB or have no known size; a body holds its bytes until
            :meth:`release`.
        max_body: Largest body of a model call or a store call, in bytes.
    """

    def __init__(self, *, patience_s: float, budget: ByteBudget, max_body: int) -> None:
        self.max_body = max_body
        self._patience_s = patience_s
        self._budget = budget
        self._taken: dict[int, int] = {}
        self._inflating = ThreadPoolExecutor(_INFLATING, thread_name_prefix="agl-inflate")

    async def read_call(self, request: EitherRequest) -> bytes:
        """Return the JSON body of a model call; raises the errors of :meth:`read` and :func:`check_values`."""
        body = await self.read(request, limit=self.max_body)
        await check_values(body)
        return body

    async def read(self, request: EitherRequest, *, limit: int) -> bytes:
        """Return the decompressed body of ``request``; bodies are decompressed in threads, two at a time.

        Raises:
            Problem: 413 if the body exceeds ``limit`` bytes, compressed or not (the rest is not read); 408 if it
                arrives too slowly; 415 for an encoding other than gzip, deflate and zstd, or for several; 400 if it
                cannot be read; 503 if it waits too long for the bytes of other large bodies.
        """
        if not isinstance(request, web.BaseRequest):
            if len(request.body) > limit:
                raise too_large(limit)
            return request.body
        encoding = _encoding_of(request)
        expected = _expected_size(request, encoding, limit)
        if expected > LARGE:
            self._taken[id(request)] = await self._budget.take(expected)
        if request.headers.get("expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await self._read(request.content, limit)
        if encoding and body:
            loop = asyncio.get_running_loop()
            body = await loop.run_in_executor(self._inflating, inflate, body, encoding, limit)
        self._hold(request, len(body))
        return body

    def release(self, request: web.BaseRequest) -> None:
        """Return the bytes that an answered request's body held to the budget."""
        self._hold(request, 0)

    def _hold(self, request: web.BaseRequest, size: int) -> None:
        """Reduce the budget held for a request to the ``size`` bytes that its body has, and give the rest back."""
        taken = self._taken.pop(id(request), 0)
        held = min(size, taken) if size > LARGE else 0
        if held:
            self._taken[id(request)] = held
        self._budget.give(taken - held)

    def close(self) -> None:
        """End the threads; bodies that wait for a thread are not decompressed any more."""
        self._inflating.shutdown(wait=False, cancel_futures=True)

    async def _read(self, content: StreamReader, limit: int) -> bytes:
        started = time.monotonic()
        try:
            first = await self._arrived(content, started, 0)
            if content.at_eof() and len(first) <= limit:
                return first
            parts, size = [first], len(first)
            while size <= limit and (chunk := await self._arrived(content, started, size)):
                parts.append(chunk)
                size += len(chunk)
        except web.RequestPayloadError as error:
            text = f"the request's body cannot be read ({error}); send it again"
            raise Problem(400, text, code="bad_body") from error
        if size > limit:
            raise too_large(limit)
        return b"".join(parts)

    async def _arrived(self, content: StreamReader, started: float, size: int) -> bytes:
        """Return the next bytes of a body, of which ``size`` bytes have arrived so far; ``b""`` at its end."""
        if content.is_eof():
            return await content.readany()
        left_s = started + self._patience_s + size / _MIN_RATE - time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                return await content.readany()
        except TimeoutError:
            raise Problem(
                408,
                f"the request's body arrives too slowly ({size} bytes in {time.monotonic() - started:.0f} s); send it "
                "faster, or in smaller parts",
                code="body_timeout",
                is_retryable=True,
            ) from None


def _expected_size(request: web.BaseRequest, encoding: str, limit: int) -> int:
    """Return the largest size, in bytes, that a body can have after decompression; raises a 413 if it is too large."""
    sent = request.content_length
    if sent is None:
        return limit if request.can_read_body else 0
    if sent > limit:
        raise too_large(limit)
    return min(limit, largest(sent, encoding)) if encoding else sent


def encodings_of(headers: MultiMapping[str]) -> list[str]:
    """Return the content encodings that the headers of a message name, without ``identity``."""
    named = (part.strip().lower() for part in ",".join(headers.getall("content-encoding", [])).split(","))
    return [name for name in named if name not in ("", "identity")]


def _encoding_of(request: web.BaseRequest) -> str:
    encodings = encodings_of(request.headers)
    if not encodings:
        return ""
    if len(encodings) > 1 or encodings[0] not in ENCODINGS:
        raise Problem(
            415,
            f"the gateway does not read content-encoding {', '.join(encodings)!r}; send {READABLE}, once, or no "
            "content-encoding",
            code="unsupported_encoding",
        )
    return encodings[0]
