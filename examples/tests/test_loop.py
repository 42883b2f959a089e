"""The loop in one file learns its task."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("httpx", reason="needs httpx")

LOOP = Path(__file__).parents[1] / "loop.py"


def test_reward_of_the_loop_rises():
    rewards = runpy.run_path(str(LOOP))["train"](steps=24)
    assert sum(rewards[:5]) / 5 < 0.25
    assert sum(rewards[-5:]) / 5 > 0.5


def test_loop_is_short_enough_to_read_and_imports_only_what_is_public():
    lines = LOOP.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 250
    imports = [line for line in lines if line.startswith(("import agl", "from agl"))]
    assert not [line for line in imports if "._" in line or "agl_" in line]
