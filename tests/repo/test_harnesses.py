"""The table of harnesses says what the page of the last tries says."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/harnesses.md").read_text(encoding="utf-8")
TABLE = tomllib.loads((ROOT / "packages/agl-harness/src/agl_harness/harnesses.toml").read_text(encoding="utf-8"))


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _tried() -> dict[str, tuple[str, list[str]]]:
    """Version and mastered situations of each harness on the page."""
    heads, _, *rows = re.findall(r"^\|.*\|$", PAGE.partition("## Results")[2].partition("\n## ")[0], re.MULTILINE)
    situations = _cells(heads)[3:]
    return {
        title: (version, [name for name, cell in zip(situations, cells, strict=True) if cell == "yes"])
        for title, version, _, *cells in map(_cells, rows)
    }


@pytest.mark.parametrize("title", _tried())
def test_the_table_has_the_results_of_the_page(title: str) -> None:
    (entry,) = [entry for entry in TABLE.values() if entry["title"] == title]
    checked = entry["checked"]
    assert _tried()[title] == (checked["version"], checked["passed"])
