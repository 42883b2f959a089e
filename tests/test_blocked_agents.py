"""A run ends when it is told to, also while agents block in calls that nothing interrupts."""

import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agl_testing.waiting import wait_until

StartAgl = Callable[..., Any]

BLOCKED = """
import pathlib, time, uuid

def solve(task):
    pathlib.Path(__file__).with_name(f"began-{uuid.uuid4().hex}").touch()
    time.sleep(300)
"""


@pytest.mark.parametrize("times", [1, 2])
def test_a_blocked_agent_does_not_hold_up_the_end(agl: StartAgl, experiment: Callable[..., Path], times: int) -> None:
    """``times``: how often the run is told to end; a person who sees nothing happen does it again."""
    file = experiment(runner="async", agent=BLOCKED)
    process = agl("run", str(file), "--quiet", cwd=file.parent)
    wait_until(lambda: len(list(file.parent.glob("began-*"))) == 3, within_s=60)

    for _ in range(times - 1):
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
    process.terminate()
    _, errors = process.communicate(timeout=60)

    assert 130 == process.returncode
    assert "stopped; everything up to the last step is kept" in errors
    assert "Traceback" not in errors
