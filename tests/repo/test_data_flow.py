"""The page on the data flow names files that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_files_of_a_calls_way_exist():
    text = (ROOT / "docs/explanation/data-flow.md").read_text(encoding="utf-8")
    files = re.findall(r"`(agl[a-z_]*/[\w/]+\.py)`", text)
    assert len(set(files)) == len(files) > 20
    assert [] == [file for file in files if not list(ROOT.glob(f"packages/*/src/{file}"))]
