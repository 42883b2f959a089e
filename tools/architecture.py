"""Draws the packages and the contracts that they fill: ``docs/explanation/architecture.svg``.

The drawing is made from the packages' metadata and from what their plugins register. It is a picture, not a diagram in
Mermaid, because pages of Mermaid load a large script from another host.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean

from tools import components
from tools.public import ROOT
from tools.release import needs_of, projects

TARGET = ROOT / "docs/explanation/architecture.svg"
CONTRACTS = (
    *("tracer", "reward", "store", "algorithm", "credit", "runner", "policy"),
    *("modality", "gateway", "redactor", "exporter", "command"),
)

_WIDTH, _LEFT, _RIGHT, _BOX, _HIGH, _STEP, _TOP = 760, 120, 580, 150, 28, 40, 60
_COLOURS = {"package": ("#dbeafe", "#3b82f6"), "contract": ("#dcfce7", "#16a34a")}
_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, \
-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif" font-size="13" role="img" aria-labelledby="title description">
  <title id="title">Packages and contracts</title>
  <desc id="description">{description}</desc>
  <defs>
    <marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">
      <path d="M0 0 L10 5 L0 10 z" fill="#4a5568"/>
    </marker>
  </defs>
  <rect x="1" y="1" width="{right}" height="{bottom}" rx="14" fill="#f8fafc" stroke="#cbd5e1"/>
  <text x="{packages}" y="36" text-anchor="middle" font-weight="600">Packages</text>
  <text x="{contracts}" y="36" text-anchor="middle" font-weight="600">Contracts of agl-core</text>
"""


def text() -> str:
    """The drawing as an SVG file."""
    return "\n".join([*_drawing(), "</svg>", ""])


def _drawing() -> Iterator[str]:
    fills = sorted(components.by_kind())
    packages = _in_order([name for name in projects() if name != "agl-core"], fills)
    height = _TOP + _STEP * len(packages) + 10
    rows = {name: _TOP + _STEP * row for row, name in enumerate(packages)}
    gap = _STEP * len(packages) / len(CONTRACTS)
    rows |= {kind: _TOP + round(gap * (row + 0.5) - _STEP / 2) for row, kind in enumerate(CONTRACTS)}
    yield _HEAD.format(
        width=_WIDTH,
        height=height,
        right=_WIDTH - 2,
        bottom=height - 2,
        packages=_LEFT + _BOX // 2,
        contracts=_RIGHT + _BOX // 2,
        description="; ".join(f"{name} fills {kind}" for name, kind in fills),
    )
    yield from (_fills(name, kind, rows) for name, kind in fills)
    for name, project in projects().items():
        yield from (_needs(name, other, rows) for other in needs_of(project) if other in packages)
    yield from (_box(name, "package", x=_LEFT, y=rows[name]) for name in packages)
    yield from (_box(kind, "contract", x=_RIGHT, y=rows[kind]) for kind in CONTRACTS)


def _in_order(packages: Sequence[str], fills: Sequence[tuple[str, str]]) -> list[str]:
    """Packages beside the contracts that they fill, so that few arrows cross; those that fill none come last."""

    def height(name: str) -> float:
        places = [CONTRACTS.index(kind) for package, kind in fills if package == name]
        return mean(places) if places else len(CONTRACTS)

    return sorted(packages, key=lambda name: (height(name), name))


def _fills(name: str, kind: str, rows: Mapping[str, float]) -> str:
    start, end = rows[name] + _HIGH // 2, rows[kind] + _HIGH // 2
    return _arrow("fills", (name, kind), f"M{_LEFT + _BOX} {start} L{_RIGHT} {end}")


def _needs(name: str, other: str, rows: Mapping[str, float]) -> str:
    start, end = rows[name] + _HIGH // 2, rows[other] + _HIGH // 2
    bend = max(20, round(_LEFT - abs(start - end) / 3))
    return _arrow("needs", (name, other), f"M{_LEFT} {start} C{bend} {start} {bend} {end} {_LEFT} {end}")


def _arrow(kind: str, ends: tuple[str, str], path: str) -> str:
    dashes = ' stroke-dasharray="5 4"' if kind == "needs" else ""
    return (
        f'  <path class="{kind}" data-from="{ends[0]}" data-to="{ends[1]}" d="{path}" fill="none" stroke="#4a5568"'
        f'{dashes} marker-end="url(#tip)"/>'
    )


def _box(name: str, kind: str, *, x: int, y: float) -> str:
    fill, stroke = _COLOURS[kind]
    corner = 6 if kind == "package" else _HIGH // 2
    return (
        f'  <rect x="{x}" y="{y}" width="{_BOX}" height="{_HIGH}" rx="{corner}" fill="{fill}" stroke="{stroke}"/>\n'
        f'  <text class="{kind}" x="{x + _BOX // 2}" y="{y + 19}" text-anchor="middle">{name}</text>'
    )
