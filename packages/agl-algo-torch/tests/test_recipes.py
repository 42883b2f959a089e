"""`grpo` accepts the recipes of papers on the page about algorithms."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from agl import PluginManager

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "choose-an-algorithm.md"


def recipes() -> dict[str, dict[str, Any]]:
    """Return the settings with a value in the page's table, by paper."""
    _, _, section = PAGE.read_text(encoding="utf-8").partition("## From papers to settings\n")
    rows = re.findall(r"^\| (.+) \(arXiv [\d.]+\) \| (.+) \|$", section.partition("\n## ")[0], re.MULTILINE)
    return {paper: tomllib.loads("\n".join(re.findall(r"`([a-z_.]+ = [^`]+)`", settings))) for paper, settings in rows}


@pytest.mark.parametrize("paper", recipes())
def test_recipe_is_accepted(paper: str) -> None:
    manager = PluginManager.from_environment()
    manager.build(manager.algorithm("grpo"), **recipes()[paper])


def blocks() -> list[dict[str, Any]]:
    """Return the algorithms in the page's experiment files."""
    found = re.findall(r"^```toml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [algorithm for text in found for algorithm in tomllib.loads(text)["algorithm"]]


@pytest.mark.parametrize("algorithm", blocks(), ids=lambda found: "-".join(found.get("params", {})) or found["use"])
def test_settings_of_the_pages_experiments_are_accepted(algorithm: dict[str, Any]) -> None:
    manager = PluginManager.from_environment()
    manager.build(manager.algorithm(algorithm["use"]), **algorithm.get("params", {}))


def test_every_recipe_of_the_table_is_read() -> None:
    found = recipes()
    assert {"GRPO", "DAPO", "RLOO", "ReMax", "GSPO"} <= set(found)
    assert {"estimator": "remax", "group_size": 1} == found["ReMax"]
