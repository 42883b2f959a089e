"""Stopping a program while it starts delays nothing, and ends everything that the program started."""

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from agl_run.runners.bound_process import BoundProcess
from agl_testing.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.skipif(sys.platform == "win32", reason="Windows has no keepers")]

PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(child.pid))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(60)
"""
"""A program that starts a child in another session and writes the child's id; the child holds its output open."""


async def start(file: Path) -> BoundProcess:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
    return await BoundProcess.start((sys.executable, "-c", PARENT, str(file)), environment=dict(os.environ), **pipes)


@pytest.mark.parametrize("turns", range(1, 12))
def test_a_start_that_is_cancelled_on_a_busy_machine_ends_with_its_descendants(tmp_path: Path, turns: int) -> None:
    """Let the event loop turn ``turns`` times, block it for half a second, and then cancel the start."""
    file = tmp_path / "child"

    async def run() -> None:
        starting = asyncio.create_task(start(file))
        for _ in range(turns):
            await asyncio.sleep(0)
        time.sleep(0.5)  # the program runs meanwhile
        starting.cancel()
        ended, _ = await asyncio.wait((starting,), timeout=40)
        assert ended == {starting}
        assert starting.cancelled()

    run_to_the_end(run())

    assert [] == running(file)


def test_a_kill_ends_though_a_stopped_keepers_descendant_holds_the_output(tmp_path: Path) -> None:
    file = tmp_path / "child"

    async def run() -> None:
        kept = await start(file)
        await asyncio.to_thread(wait_until, file.exists, within_s=20)
        os.kill(kept.process.pid, signal.SIGSTOP)
        async with asyncio.timeout(40):
            await kept.kill()
            await kept.wait()

    run_to_the_end(run())

    os.kill(int(file.read_text()), signal.SIGKILL)


def run_to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``; the test fails if it leaves a pipe open, about which asyncio warns when the pipe is collected."""
    asyncio.run(work)
    gc.collect()


def running(file: Path) -> list[str]:
    """Return the child's id if the child is still running."""
    entry = Path(f"/proc/{file.read_text()}/cmdline") if file.exists() else file
    return [file.read_text()] if entry != file and entry.exists() and entry.read_bytes() else []
