"""Nothing that a run started outlives it: programs, worker processes and what they started, after any kill."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agl_testing.waiting import wait_until

from .programs import alive, command_of

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")

StartAgl = Callable[..., Any]

FAMILY = '''
import json, os, subprocess, sys, time

WAITING = [sys.executable, "-c", "import time; time.sleep(90)"]


def solve(task):
    """Start a child, and another one in a session of its own, then hang or end."""
    children = [subprocess.Popen(WAITING), subprocess.Popen(WAITING, start_new_session=True)]
    file = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"pids-{os.getpid()}")
    with open(file + ".new", "w") as new:
        json.dump([os.getppid(), os.getpid(), *(child.pid for child in children)], new)
    os.rename(file + ".new", file + ".json")
    time.sleep(90)
    return 1.0


if __name__ == "__main__":
    solve(None)
'''


def start(agl: StartAgl, file: Path, runner: str, *, limit: str = "") -> Any:
    """Start an experiment whose agent hangs beside its children, with temporary files in a folder of the test's."""
    text = file.read_text().replace("concurrency = 3", f"concurrency = 3\n{limit}")
    if runner == "command":
        text = text.replace('agent = "toy_agent:solve"', f"agent = {json.dumps([sys.executable, 'toy_agent.py'])}")
    file.write_text(text)
    temporary = file.parent / "tmp"
    temporary.mkdir(exist_ok=True)
    return agl(
        *("run", str(file), "--quiet", "--fresh"),
        cwd=file.parent,
        TMPDIR=str(temporary),
        PYTHONFAULTHANDLER="1",  # SIGABRT prints the stacks
    )


def stop(process: subprocess.Popen[str]) -> None:
    """Ask the command to stop; if it does not, fail with where it hangs, or with who still holds its output."""
    process.terminate()
    try:
        process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        status = process.poll()
        holders = [
            f"{pid} {command_of(int(pid))}" for pid in os.listdir("/proc") if pid.isdigit() and shares(pid, process)
        ]
        process.send_signal(signal.SIGABRT)
        for pid in holders:
            os.kill(int(pid.split()[0]), signal.SIGKILL)
        _, errors = process.communicate(timeout=30)
        pytest.fail(f"30 s after SIGTERM its status was {status}; its output was held by {holders}\n{errors}")


def shares(pid: str, process: subprocess.Popen[str]) -> bool:
    """Return true if another process has the pipe of this one's errors open."""
    assert process.stderr is not None
    pipe = os.readlink(f"/proc/self/fd/{process.stderr.fileno()}")
    folder = f"/proc/{pid}/fd"
    try:
        return int(pid) not in (os.getpid(), process.pid) and pipe in [
            os.readlink(f"{folder}/{name}") for name in os.listdir(folder)
        ]
    except OSError:  # it has ended, or is another user's
        return False


def families(file: Path, *, count: int = 3) -> list[list[int]]:
    """Wait for the agents; returns the ids of each one's keeper, process and children."""
    wait_until(lambda: len(list(file.parent.glob("pids-*.json"))) >= count, within_s=60)
    return [json.loads(found.read_text()) for found in file.parent.glob("pids-*.json")]


@pytest.mark.parametrize("runner", ["process", "command"])
def test_agents_and_their_descendants_end_with_a_killed_trainer(
    agl: StartAgl, experiment: Callable[..., Path], runner: str
) -> None:
    file = experiment(runner=runner, agent=FAMILY)
    process = start(agl, file, runner)
    pids = [pid for family in families(file) for pid in family]
    assert len(pids) == len(alive(pids))

    process.kill()
    process.communicate(timeout=60)

    wait_until(lambda: not alive(pids), within_s=40)


def test_agents_and_their_children_end_with_a_killed_keeper(agl: StartAgl, experiment: Callable[..., Path]) -> None:
    file = experiment(runner="command", agent=FAMILY)
    process = start(agl, file, "command")
    keeper, program, child, _ = families(file)[0]

    os.kill(keeper, signal.SIGKILL)

    wait_until(lambda: not alive([keeper, program, child]), within_s=40)
    stop(process)


@pytest.mark.parametrize("runner", ["process", "command"])
def test_time_limit_ends_the_descendants_of_an_agent(
    agl: StartAgl, experiment: Callable[..., Path], runner: str
) -> None:
    file = experiment(runner=runner, agent=FAMILY)
    process = start(agl, file, runner, limit="timeout_s = 1.0")
    pids = families(file)[0]

    wait_until(lambda: not alive(pids), within_s=40)
    stop(process)


def test_temporary_folders_of_a_killed_trainer_go_at_the_next_start_and_no_others(
    agl: StartAgl, experiment: Callable[..., Path]
) -> None:
    file = experiment(runner="command", agent=FAMILY)
    temporary = file.parent / "tmp"
    process = start(agl, file, "command")
    families(file)
    process.kill()
    process.communicate(timeout=60)
    left = list(temporary.glob("agl-run-*"))
    assert left
    for found in file.parent.glob("pids-*.json"):
        found.unlink()

    second = start(agl, file, "command")
    families(file)
    held = list(temporary.glob("agl-run-*"))
    agl("exec", "--", sys.executable, "-c", "", cwd=file.parent, TMPDIR=str(temporary)).communicate(timeout=60)

    assert [] == [path for path in left if path.exists()]
    assert held == [path for path in held if path.exists()]
    stop(second)
    assert [] == list(temporary.glob("agl-run-*"))
