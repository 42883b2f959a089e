"""What a program prints, in bounded memory: how it began and how it ended."""

import asyncio
from collections import deque

HEAD = 16_000
"""Bytes kept of the beginning."""

TAIL = 64_000
"""Bytes kept of the end."""

_CHUNK = 64 * 1024


class PrintedText:
    """Takes any number of bytes and keeps the first ``HEAD`` and the last ``TAIL`` of them."""

    def __init__(self) -> None:
        self._head = b""
        self._tail: deque[bytes] = deque()
        self._in_tail = 0
        self._total = 0

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Take all that comes until the stream ends."""
        while chunk := await stream.read(_CHUNK):
            self.add(chunk)

    def add(self, data: bytes) -> None:
        """Take more."""
        self._total += len(data)
        room = HEAD - len(self._head)
        self._head += data[:room]
        if data := data[room:]:
            self._tail.append(data)
            self._in_tail += len(data)
        while self._tail and self._in_tail - len(self._tail[0]) >= TAIL:
            self._in_tail -= len(self._tail.popleft())

    def text(self) -> str:
        """What was kept; a line of its own says how much is missing between the two parts."""
        tail = b"".join(self._tail)[-TAIL:]
        left_out = self._total - len(self._head) - len(tail)
        if not left_out:
            return (self._head + tail).decode(errors="replace")
        gap = f"\n[{left_out} bytes left out]\n"
        return self._head.decode(errors="replace") + gap + tail.decode(errors="replace")
