"""Refuses JSON of so many values that parsing it would hold up all other requests."""

import asyncio
from collections.abc import Iterator

from agl_gateway.wire.problems import Problem

MAX_CONTAINERS = 200_000
MAX_VALUES = 4_000_000
"""More than prompts of token ids have; a parser makes an object of each, and keeps the thread meanwhile."""

PIECE = 1 << 18
"""Bytes looked at between two turns of the event loop."""


async def check_values(body: bytes) -> None:
    """Look at a JSON body before it is parsed, piece by piece, so that other requests are answered meanwhile.

    Raises:
        Problem: 413 when it has more than 200,000 lists and objects, or more than 4,000,000 values.
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
    """Cut a body into pieces, none of them between a backslash and the character that it escapes."""
    start = 0
    while start < len(body):
        piece = body[start : start + PIECE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = body[start : start + PIECE + 1]
        yield piece
        start += len(piece)
