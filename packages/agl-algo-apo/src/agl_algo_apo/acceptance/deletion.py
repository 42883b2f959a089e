"""Pruning: the changes that a text holds against the first one, each of which can be undone alone.

A change is a line that was added, or a group of lines that replaced others; a text of one line is cut into sentences.
Whether a change earns its place, a race without it tells (`apo.py`): lines that a merge carried along, or that were
written for training tasks alone, give nothing on tasks that their author did not see.
"""

import difflib
import re
from itertools import pairwise

from agl.schemas import Record


class Change(Record, frozen=True, kw_only=True):
    """One change of a text.

    Attributes:
        key: The lines that came in, by which the change is known in later texts too.
        without: The text with this change undone.
    """

    key: str
    without: str


def changes(first: str, text: str) -> list[Change]:
    """Return the changes that ``text`` holds against the first text, in order; pure deletions are none."""
    pattern = r"(?<=\n)" if "\n" in text.strip() else r"(?<=[.!?]) +(?=\S)"
    base, parts = (_parts(pattern, whole) for whole in (first, text))
    found: list[Change] = []
    matcher = difflib.SequenceMatcher(a=base, b=parts, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        # Lines that were added are undone one by one; those that replaced others only together.
        spans = [(j, j + 1) for j in range(j1, j2)] if tag == "insert" else [(j1, j2)] if tag == "replace" else []
        for start, stop in spans:
            key = "".join(parts[start:stop]).strip()
            if key:
                found.append(Change(key=key, without="".join([*parts[:start], *base[i1:i2], *parts[stop:]])))
    return found


def without(first: str, text: str, keys: frozenset[str]) -> str:
    """Return the text with the changes of these keys undone."""
    for key in sorted(keys):
        text = next((change.without for change in changes(first, text) if change.key == key), text)
    return text


def _parts(pattern: str, text: str) -> list[str]:
    """Return the parts of a text, each with the space that follows it, so that together they are the text again."""
    cuts = [0, *(match.end() for match in re.finditer(pattern, text)), len(text)]
    return [text[start:stop] for start, stop in pairwise(cuts) if start < stop]
