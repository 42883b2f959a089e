"""Two coding harnesses use a tool against a scripted model; ``nox -s harness`` runs the whole matrix."""

import asyncio
from pathlib import Path

import pytest

from agl_harness.installation import locate
from agl_harness.table import load_table
from tools.harness_matrix.cells import play
from tools.harness_matrix.knobs import KNOBS

INSTALLED = Path(__file__).parents[1] / ".nox" / "harnesses"


@pytest.mark.parametrize("name", ["pi", "gemini-cli"])
def test_harness_uses_a_tool_and_every_token_is_in_one_row(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL_HARNESSES", str(INSTALLED))
    harness = load_table()[name]
    program = locate(harness)
    if program is None:
        pytest.skip(f"{harness.label} is not installed; nox -s integration installs it where npm is")
    result = asyncio.run(play(harness, program, KNOBS[name], "tool", tmp_path))
    assert ("", 2, 1) == (result.cause, result.calls, result.rows)
