"""Reads whole request bodies and inflates them in threads, with a limit on their size after decompression.

The server itself inflates nothing, so a body costs no more than its own bytes before its sender is known.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

from aiohttp import StreamReader, web

from agl_gateway.relay.budget import ByteBudget
from agl_gateway.relay.inflating import ENCODINGS, READABLE, inflate, largest, too_large
from agl_gateway.wire.problems import Problem

_INFLATING = 2
"""Bodies that are inflated at once; each may take as much memory as the limit of its endpoint."""

_LARGE = 1024 * 1024
_MIN_RATE = 64 * 1024
"""Bytes per second at which bodies must arrive."""


class BodyReader:
    """Reads the bodies of one gateway's requests, after their sender was verified. Close it to end its threads.

    Args:
        patience_s: Seconds that a body may take to arrive, and one more for every 64 KiB.
        budget: Bytes for all bodies above 1 MiB, and for those whose size is unknown, until :meth:`release`.
    """

    def __init__(self, *, patience_s: float, budget: ByteBudget) -> None:
        self._patience_s = patience_s
        self._budget = budget
        self._taken: dict[int, int] = {}
        self._inflating = ThreadPoolExecutor(_INFLATING, thread_name_prefix="agl-inflate")

    async def read(self, request: web.BaseRequest, *, limit: int) -> bytes:
        """Return the decompressed body of ``request``; bodies are inflated in threads, two at a time.

        Raises:
            Problem: 413 when the body exceeds ``limit`` bytes, compressed or not, the rest of which is neither read nor
                inflated; 408 when it arrives too slowly; 415 for an encoding other than gzip, deflate and zstd, or for
                several; 400 when it cannot be read; 503 when large bodies wait too long for each other.
        """
        encoding = _encoding_of(request)
        expected = _expected_size(request, encoding, limit)
        if expected > _LARGE:
            self._taken[id(request)] = await self._budget.take(expected)
        body = await self._read(request.content, limit)
        if encoding and body:
            loop = asyncio.get_running_loop()
            body = await loop.run_in_executor(self._inflating, inflate, body, encoding, limit)
        self._keep(request, len(body))
        return body

    def release(self, request: web.BaseRequest) -> None:
        """Give the bytes of a request's body back, once it is answered."""
        self._keep(request, 0)

    def _keep(self, request: web.BaseRequest, size: int) -> None:
        """Keep only the bytes that a body really has."""
        taken = self._taken.pop(id(request), 0)
        kept = min(size, taken) if size > _LARGE else 0
        if kept:
            self._taken[id(request)] = kept
        self._budget.give(taken - kept)

    def close(self) -> None:
        """End the threads; bodies that wait for one are not inflated."""
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
            raise Problem(
                400, f"the request's body cannot be read ({error}); send it again", code="bad_body"
            ) from error
        if size > limit:
            raise too_large(limit)
        return b"".join(parts)

    async def _arrived(self, content: StreamReader, started: float, size: int) -> bytes:
        """Return the next bytes of a body of which ``size`` have arrived; ``b""`` at its end."""
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
    """Return the most bytes that a body may have, read and inflated; raises a 413 for one that is too long."""
    sent = request.content_length
    if sent is None:
        return limit if request.can_read_body else 0
    if sent > limit:
        raise too_large(limit)
    return min(limit, largest(sent, encoding)) if encoding else sent


def _encoding_of(request: web.BaseRequest) -> str:
    sent = ", ".join(request.headers.getall("content-encoding", []))
    encodings = [item for item in (part.strip().lower() for part in sent.split(",")) if item not in ("", "identity")]
    if not encodings:
        return ""
    if len(encodings) > 1 or encodings[0] not in ENCODINGS:
        raise Problem(
            415,
            f"the gateway does not read content-encoding {sent!r}; send {READABLE}, once, or no content-encoding",
            code="unsupported_encoding",
        )
    return encodings[0]
