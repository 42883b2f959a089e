"""The page on the data flow names files that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_files_of_the_ways_exist():
    text = (ROOT / "docs/explanation/data-flow.md").read_text(encoding="utf-8")
    files = set(re.findall(r"`(agl[a-z_]*/[\w/]+\.py)`", text))
    assert len(files) > 40
    assert [] == sorted(file for file in files if not list(ROOT.glob(f"packages/*/src/{file}")))
