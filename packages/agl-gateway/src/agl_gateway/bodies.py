"""Request bodies, read whole and within a limit that holds for what they inflate to."""

from aiohttp import web

from agl_gateway.problems import Problem


async def read_body(request: web.BaseRequest, *, limit: int) -> bytes:
    """The body of ``request``, content encodings undone.

    Raises:
        Problem: 413 when it is, or inflates to, more than ``limit`` bytes; it is not read further then.
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
            413, f"the request's body is larger than {limit} bytes; send less at once", code="request_too_large"
        )
    return b"".join(parts)
