"""Reads and inflates whole bodies, with a limit on their size after decompression."""

import zlib

from aiohttp import web

from agl_gateway.problems import Problem

_MAX_INFLATED = 64 * 1024 * 1024


async def read_body(request: web.BaseRequest, *, limit: int) -> bytes:
    """Return the decompressed body of ``request``.

    Raises:
        Problem: 413 when the decompressed body exceeds ``limit`` bytes, the rest of which is not read; 400 when it
            cannot be decompressed.
    """
    try:
        return await _read(request, limit)
    except web.RequestPayloadError as error:
        encoding = request.headers.get("content-encoding", "")
        raise Problem(
            400,
            f"the request's body cannot be read as content-encoding {encoding!r}; send what the header says, or no "
            "content-encoding",
            code="invalid_encoding",
        ) from error


async def _read(request: web.BaseRequest, limit: int) -> bytes:
    content = request.content
    first = await content.readany()
    if content.at_eof() and len(first) <= limit:
        return first
    parts, size = [first], len(first)
    while chunk := await content.readany():
        parts.append(chunk)
        size += len(chunk)
        if size > limit:
            break
    if size > limit:
        raise Problem(
            413, f"the request's body is larger than {limit} bytes; send it in smaller parts", code="request_too_large"
        )
    return b"".join(parts)


def plain_bytes(body: bytes, encoding: str) -> bytes:
    """Return the decompressed ``body``; unchanged if that fails or exceeds 64 MiB."""
    if encoding not in ("gzip", "deflate"):
        return body
    inflater = zlib.decompressobj(wbits=47 if encoding == "gzip" else 15)
    try:
        return inflater.decompress(body, _MAX_INFLATED)
    except zlib.error:
        return body
