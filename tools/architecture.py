"""Draws the packages and the contracts that they fill into ``docs/explanation/architecture.md``.

The drawing is mermaid, made from the packages' metadata and from what their plugins register.
"""

import re
from collections.abc import Iterator

from tools import components
from tools.public import ROOT
from tools.release import needs_of, projects

TARGET = ROOT / "docs/explanation/architecture.md"
DRAWING = re.compile(r"(?<=^```mermaid\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)
CONTRACTS = ("tracer", "reward", "store", "algorithm", "credit", "runner", "policy", "gateway", "exporter", "command")


def text() -> str:
    """The page with its drawing as it has to be."""
    return DRAWING.sub(lambda _: "".join(f"{line}\n" for line in drawing()), TARGET.read_text(encoding="utf-8"))


def drawing() -> Iterator[str]:
    """Lines of the drawing: the core with its contracts, the packages, and two kinds of arrows."""
    every = projects()
    drawn = [name for name in every if name != "agl-core"]
    yield "flowchart LR"
    yield from (f'  {_id(name)}["{name}"]' for name in drawn)
    yield '  subgraph core ["agl-core: contracts"]'
    yield from (f'    {kind}(["{kind}"])' for kind in CONTRACTS)
    yield "  end"
    for name, kind in sorted(components.by_kind()):
        yield f"  {_id(name)} --> {kind}"
    for name, project in every.items():
        yield from (f"  {_id(name)} -. needs .-> {_id(other)}" for other in needs_of(project) if other in drawn)


def _id(name: str) -> str:
    return name.replace("-", "_")
