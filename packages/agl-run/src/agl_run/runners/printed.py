"""Keeps a program's output in bounded memory: its beginning and its end."""

import asyncio
from collections import deque

HEAD = 16_000
"""Bytes kept of the beginning."""

TAIL = 64_000
"""Bytes kept of the end."""

_CHUNK = 64 * 1024


class PrintedText:
    """Accepts any number of bytes, and keeps the first ``HEAD`` and the last ``TAIL`` of them."""

    def __init__(self) -> None:
        self._head = b""
        self._tail: deque[bytes] = deque()
        self._in_tail = 0
        self._total = 0

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Add the bytes of a stream until it ends."""
        while chunk := await stream.read(_CHUNK):
            self.add(chunk)

    def add(self, data: bytes) -> None:
        """Add bytes."""
        self._total += len(data)
        room = HEAD - len(self._head)
        self._head += data[:room]
        if data := data[room:]:
            self._tail.append(data)
            self._in_tail += len(data)
        while self._tail and self._in_tail - len(self._tail[0]) >= TAIL:
            self._in_tail -= len(self._tail.popleft())

    def text(self) -> str:
        """Return the kept text; a line between the two parts gives the number of missing bytes."""
        tail = b"".join(self._tail)[-TAIL:]
        left_out = self._total - len(self._head) - len(tail)
        if not left_out:
            return (self._head + tail).decode(errors="replace")
        gap = f"\n[{left_out} bytes left out]\n"
        return self._head.decode(errors="replace") + gap + tail.decode(errors="replace")
