"""Inflates bodies piece by piece, so that a small one that grows without end is refused before it fills the memory."""

import zlib
from collections.abc import Iterator

import zstandard

from agl_gateway.wire.problems import Problem

ENCODINGS = ("gzip", "x-gzip", "deflate", "zstd")
"""Content encodings of requests that the gateway reads."""

READABLE = "gzip, deflate or zstd"

_MAX_INFLATED = 64 * 1024 * 1024
_STEP, _PIECE = 64 * 1024, 256 * 1024
_GZIP, _ZLIB, _RAW = 31, 15, -15

_ZSTD_STEP = 1024
"""Bytes of a zstd stream that are read at once; they become 32 MiB at most."""

_ZSTD_WINDOW = 8 * 1024 * 1024
"""The largest window, which is memory: what RFC 8878 asks readers of web content to support, and senders to keep to."""


def largest(size: int, encoding: str) -> int:
    """Return the most bytes that a body of ``size`` can become.

    No stream of deflate becomes more than 1,032 times as long. A block of zstd has 128 KiB at most, and takes 4 bytes
    at least.
    """
    return size * (32 * 1024 if encoding == "zstd" else 1032)


def inflate(body: bytes, encoding: str, limit: int) -> bytes:
    """Return the decompressed body.

    Raises:
        Problem: 413 when it exceeds ``limit`` bytes, of which no more is inflated; 400 when it cannot be read, or is
            more or less than one stream.
    """
    pieces, left = list[bytes](), limit
    view = memoryview(body)
    try:
        for piece in _zstd(view) if encoding == "zstd" else _deflate(view, _wbits(body, encoding)):
            left -= len(piece)
            if left < 0:
                raise too_large(limit)
            pieces.append(piece)
    except (zlib.error, zstandard.ZstdError) as error:
        raise _unreadable(encoding) from error
    return b"".join(pieces)


def too_large(limit: int) -> Problem:
    """Return the answer to a body of more than ``limit`` bytes."""
    return Problem(
        413, f"the request's body is larger than {limit} bytes; send it in smaller parts", code="request_too_large"
    )


def plain_bytes(body: bytes, encoding: str) -> bytes:
    """Return the decompressed ``body`` of an answer; unchanged if that fails or exceeds 64 MiB."""
    if encoding not in ("gzip", "deflate"):
        return body
    inflater = zlib.decompressobj(wbits=47 if encoding == "gzip" else 15)
    try:
        return inflater.decompress(body, _MAX_INFLATED)
    except zlib.error:
        return body


def _wbits(body: bytes, encoding: str) -> int:
    if encoding != "deflate":
        return _GZIP
    return _ZLIB if body[0] & 0x0F == 8 else _RAW  # some clients send deflate without zlib's header


def _deflate(body: memoryview, wbits: int) -> Iterator[bytes]:
    """Inflate in small pieces, so that no thread waits long; raises ``zlib.error`` unless all is one stream."""
    inflater = zlib.decompressobj(wbits)
    for start in range(0, len(body), _STEP):
        sent: bytes | memoryview = body[start : start + _STEP]
        while len(sent):
            yield inflater.decompress(sent, _PIECE)
            sent = inflater.unconsumed_tail
    yield inflater.flush()
    if not inflater.eof or inflater.unused_data:
        raise zlib.error("the body is more or less than one stream")


def _zstd(body: memoryview) -> Iterator[bytes]:
    """Inflate in small pieces; raises ``ZstdError`` unless all is one frame."""
    inflater = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()
    for start in range(0, len(body), _ZSTD_STEP):
        if inflater.eof:
            raise zstandard.ZstdError("the body is more than one frame")
        yield inflater.decompress(body[start : start + _ZSTD_STEP])
    if not inflater.eof or inflater.unused_data:
        raise zstandard.ZstdError("the body is more or less than one frame")


def _unreadable(encoding: str) -> Problem:
    return Problem(
        400,
        f"the request's body cannot be read as content-encoding {encoding!r}; send what the header says, or no "
        "content-encoding",
        code="invalid_encoding",
    )
