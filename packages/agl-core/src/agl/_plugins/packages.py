"""The distributions of well-known components, for the ``pip install`` line of one that is not installed."""

from functools import cache
from pathlib import Path

import msgspec

from agl._entries import Kind


@cache
def known() -> dict[tuple[Kind, str], str]:
    """Distribution by kind and name of a component, from a table that ``python -m tools.generate`` writes."""
    table = Path(__file__).with_name("packages.json").read_bytes()
    found = msgspec.json.decode(table, type=dict[str, dict[Kind, list[str]]])
    return {(kind, name): home for home, kinds in found.items() for kind, names in kinds.items() for name in names}
