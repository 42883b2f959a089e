"""Describes stored pictures, sounds and documents on one line each, and draws pictures in terminals that can.

Pictures are neither decoded nor scaled: iTerm2's sequence takes a file of any kind, kitty's takes PNG.
"""

import base64
import os
import struct
import sys
from collections.abc import Iterator
from typing import NamedTuple

from agl.contracts import Store
from agl_inspect.rollouts.conversations import DIGEST
from agl_inspect.rollouts.turns import Turn

COLUMNS, ROWS = 48, 12
"""The most cells that a drawn picture takes; smaller pictures keep their size."""

MOST_PIXELS, MOST_BYTES = 2**25, 1_000_000
"""Pictures that claim more pixels, for which a terminal would reserve memory, or have more bytes are not drawn."""

_CELL = 10, 20  # pixels, about
_PNG = b"\x89PNG\r\n\x1a\n"
_HEADER = 2**20  # holds the size of a JPEG even after a preview and a colour profile
_FRAMES = frozenset(range(0xFFC0, 0xFFD0)) - {0xFFC4, 0xFFC8, 0xFFCC}
"""JPEG's markers of a header with the size (ITU T.81, table B.1)."""


class Medium(NamedTuple):
    """The line that describes a medium, and the sequence that draws it below; ``""`` if the terminal cannot."""

    line: str
    drawing: str = ""


async def media_of_turn(store: Store, turn: Turn) -> dict[str, Medium]:
    """Return the stored media of a turn's messages and tool results by their digests."""
    found: dict[str, Medium] = {}
    for part in (part for said in turn.messages for each in (said, *said.tools) for part in each.media):
        name = f"{part.kind[:40]} {part.reference[: len(DIGEST) + 12]}…"
        found[part.reference] = Medium(f"{name}, gone from the store")
        for blob in await store.blobs([part.reference]):
            size = size_of(blob.data[:_HEADER])
            facts = [name, blob.media_type[:40], f"{size[0]}x{size[1]}" if size else "", _bytes(len(blob.data))]
            found[part.reference] = Medium(", ".join(filter(None, facts)), "".join(_drawing(blob.data, size)))
    return found


def size_of(data: bytes) -> tuple[int, int] | None:
    """Return the width and height that a PNG, GIF, JPEG or WebP file claims; ``None`` for other and cut files."""
    try:
        if data.startswith(_PNG):
            return struct.unpack_from(">II", data, 16)
        if data.startswith((b"GIF87a", b"GIF89a")):
            return struct.unpack_from("<HH", data, 6)
        if data.startswith(b"\xff\xd8"):
            return _jpeg(data)
        return _webp(data) if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None
    except struct.error:
        return None


def _jpeg(data: bytes) -> tuple[int, int] | None:
    at, marker = 2, 0xFF00
    while marker >= 0xFF00:
        marker, length, height, width = struct.unpack_from(">HHxHH", data, at)
        if marker in _FRAMES:
            return width, height
        at += 2 + length
    return None


def _webp(data: bytes) -> tuple[int, int] | None:
    """See RFC 9649, sections 2.5 to 2.7."""
    kind, first, last = struct.unpack_from("<4s4xQH", data, 12)
    if kind == b"VP8X":  # flags, then two sizes of 24 bits, less 1
        return 1 + (first >> 32 & 0xFFFFFF), 1 + (first >> 56 | last << 8)
    if kind == b"VP8L":  # a signature of 8 bits, then two sizes of 14 bits, less 1
        return 1 + (first >> 8 & 0x3FFF), 1 + (first >> 22 & 0x3FFF)
    return (first >> 48 & 0x3FFF, last & 0x3FFF) if kind == b"VP8 " else None


def _bytes(count: int) -> str:
    return f"{count / 1000:,.0f} kB" if count >= 1000 else f"{count} bytes"


def _drawing(data: bytes, size: tuple[int, int] | None) -> Iterator[str]:
    """Yield the parts of the sequence that draws a picture."""
    terminal = _terminal()
    if not terminal or len(data) > MOST_BYTES or size is None or not 0 < size[0] * size[1] <= MOST_PIXELS:
        return
    wide, high = size[0] / (COLUMNS * _CELL[0]), size[1] / (ROWS * _CELL[1])
    text = base64.b64encode(data).decode()
    if terminal == "iterm":
        limits = f";width={COLUMNS};height={ROWS}" if max(wide, high) > 1 else ""
        yield f"\x1b]1337;File=inline=1;size={len(data)}{limits}:{text}\a"
    elif data.startswith(_PNG):
        limits = "" if max(wide, high) <= 1 else f",c={COLUMNS}" if wide > high else f",r={ROWS}"
        for at in range(0, len(text), 4096):
            keys = "" if at else f"a=T,f=100,q=2{limits},"
            yield f"\x1b_G{keys}m={int(at + 4096 < len(text))};{text[at : at + 4096]}\x1b\\"


def _terminal() -> str:
    """Return which sequence the terminal draws: ``iterm``, ``kitty`` or ``""``; multiplexers garble both."""
    has = os.environ.get
    kind = has("TERM", "")
    if not sys.stdout.isatty() or has("NO_COLOR") or has("TMUX") or has("STY") or kind.startswith(("tmux", "screen")):
        return ""
    if kind in ("xterm-kitty", "xterm-ghostty"):
        return "kitty"
    if has("TERM_PROGRAM") in ("iTerm.app", "WezTerm"):
        return "iterm"
    return "kitty" if has("KITTY_WINDOW_ID") else ""
