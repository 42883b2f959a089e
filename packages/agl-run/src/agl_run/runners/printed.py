"""Keeps a program's output in bounded memory: its beginning, its end, and its last line."""

import asyncio
from collections import deque

HEAD = 16_000
"""Bytes kept of the beginning."""

TAIL = 64_000
"""Bytes kept of the end."""

LINE = 1 << 20
"""Bytes kept of the last line."""

_CHUNK = 64 * 1024


class PrintedText:
    """Accepts any number of bytes; keeps the first ``HEAD`` and the last ``TAIL`` of them, and the last line."""

    def __init__(self) -> None:
        self._head = b""
        self._tail: deque[bytes] = deque()
        self._in_tail = 0
        self._total = 0
        self._line = b""
        self._open = bytearray()

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Add the bytes of a stream until it ends."""
        while chunk := await stream.read(_CHUNK):
            self.add(chunk)

    def add(self, data: bytes) -> None:
        """Add bytes."""
        self._total += len(data)
        self._follow(data)
        room = HEAD - len(self._head)
        self._head += data[:room]
        if data := data[room:]:
            self._tail.append(data)
            self._in_tail += len(data)
        while self._tail and self._in_tail - len(self._tail[0]) >= TAIL:
            self._in_tail -= len(self._tail.popleft())

    def _follow(self, data: bytes) -> None:
        """Keep the last line that ended and is not blank, and the one that has not ended."""
        ended, separator, rest = data.replace(b"\r", b"\n").rpartition(b"\n")
        if separator:
            lines = bytes(self._open + ended).rstrip()
            self._line = lines[lines.rfind(b"\n") + 1 :][: LINE + 1] or self._line
            self._open.clear()
        self._open += rest[: LINE + 1 - len(self._open)]

    @property
    def last_line(self) -> bytes:
        """The last line that is not blank, without blanks around it; of a longer one its first ``LINE + 1`` bytes.

        Lines end at a line feed or a carriage return, neither of which JSON has within a text.
        """
        return bytes(self._open).strip() or self._line.strip()

    def text(self) -> str:
        """Return the kept text; a line between the two parts gives the number of missing bytes."""
        tail = b"".join(self._tail)[-TAIL:]
        left_out = self._total - len(self._head) - len(tail)
        if not left_out:
            return (self._head + tail).decode(errors="replace")
        gap = f"\n[{left_out} bytes left out]\n"
        return self._head.decode(errors="replace") + gap + tail.decode(errors="replace")
