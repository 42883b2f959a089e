"""Reads whole request bodies, with a limit on their size after decompression."""

from aiohttp import web

from agl_gateway.problems import Problem


async def read_body(request: web.BaseRequest, *, limit: int) -> bytes:
    """Return the decompressed body of ``request``.

    Raises:
        Problem: 413 when the decompressed body exceeds ``limit`` bytes; the rest is not read.
    """
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
