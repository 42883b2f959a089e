"""Makes text of agents and models safe for a terminal, and shortens text to one line."""

from collections.abc import Mapping
from math import inf
from typing import Any

from agl.contracts import Moments
from agl.schemas import to_json

CONTROLS = (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Control characters except tab and line feed, and the characters that reverse the direction of text."""

_VISIBLE = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in CONTROLS}


def visible(text: str) -> str:
    """Escape the control characters in text, so that a terminal shows them instead of obeying them."""
    return text.translate(_VISIBLE)


def ends(low: float | None, high: float | None, form: str = ".3f", *, label: str = "") -> str:
    """Return the ends of an interval as ``LABEL [LOW, HIGH]``; ``""`` for ends that are unknown, infinite or equal.

    Values that happen to be equal leave an interval without a width, which would look like certainty.
    """
    is_shown = low is not None and high is not None and -inf < low < high < inf
    return f"{label} [{low:{form}}, {high:{form}}]" if is_shown else ""


def parts_text(parts: Mapping[str, Moments]) -> str:
    """Return the parts of rewards as ``exact 10 of 96, form 0.83``; a part that is always 0 or 1 as a count of ones."""
    return ", ".join(f"{name} {_part(found)}" for name, found in parts.items())


def _part(found: Moments) -> str:
    # The spread of zeros and ones follows from their mean.
    is_count = abs(found.squares - found.count * found.mean * (1 - found.mean)) < 1e-6
    return f"{round(found.mean * found.count):,} of {found.count:,}" if is_count else f"{found.mean:.3g}"


def short(value: Any, limit: int = 60) -> str:
    """Format a value on one line of at most ``limit`` characters."""
    text = " ".join((value if isinstance(value, str) else to_json(value).decode()).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
