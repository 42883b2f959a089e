"""Makes text of agents and models safe for a terminal, and shortens text to one line."""

from typing import Any

from agl.schemas import to_json

CONTROLS = (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Control characters except tab and line feed, and the characters that reverse the direction of text."""

_VISIBLE = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in CONTROLS}


def visible(text: str) -> str:
    """Escape the control characters in text, so that a terminal shows them instead of obeying them."""
    return text.translate(_VISIBLE)


def count_of(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 row``, ``2 rows``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def short(value: Any, limit: int = 60) -> str:
    """Format a value on one line of at most ``limit`` characters."""
    text = " ".join((value if isinstance(value, str) else to_json(value).decode()).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
