"""``agl run --console``: the console beside a run, which ends when the run ends, however that happens."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from agl_testing.commands import run_agl
from agl_testing.waiting import wait_until

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")

AGENT = '''
import time
from pathlib import Path


def solve(task):
    """End when the test says so."""
    while not Path("end").exists():
        time.sleep(0.02)
    return 1.0
'''

EXPERIMENT = """
[experiment]
name = "waits"
agent = "agent:solve"
val = "tasks.jsonl"
store = "sqlite:///runs/waits.db"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('{"n": 1}\n')
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    return tmp_path


@contextmanager
def running(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start ``agl run --console`` with an agent that waits; yield the process and the printed address."""
    command = [sys.executable, "-m", "agl", "run", "experiment.toml", "--console", "--quiet"]
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # A shell without job control starts what runs in the background with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        match = re.fullmatch(r"console at (http://127\.0\.0\.1:\d+/) while this run lasts\n", said)
        try:
            assert match is not None, said
            yield process, match[1]
        finally:
            process.kill()


def consoles(folder: Path) -> list[str]:
    """Return the processes that serve a console over the folder's store, or that restart one."""
    words = f"console\0sqlite:///{folder}/runs/waits.db".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and words in (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:
            continue  # it ended meanwhile
    return found


def test_console_shows_the_run_and_ends_with_it(folder: Path) -> None:
    with running(folder) as (process, address):

        def shown() -> bool:
            with urlopen(f"{address}rollouts?experiment=waits") as answer:
                return b"waits-1-validate-val" in answer.read()

        wait_until(shown)
        assert 2 == len(consoles(folder))  # with its keeper
        (folder / "end").touch()
        output, errors = process.communicate()
        assert 0 == process.returncode, errors
    assert "finished waits" in output
    assert "console at" not in output + errors
    assert [] == consoles(folder)
    with pytest.raises(URLError):
        urlopen(address)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_console_outlives_a_run_that_was_stopped(folder: Path, number: signal.Signals) -> None:
    with running(folder) as (process, _):
        wait_until(lambda: (folder / "runs" / "waits.db").exists())
        process.send_signal(number)
        process.wait(60)
        wait_until(lambda: not consoles(folder))


@pytest.mark.parametrize(
    ("store", "expected"),
    [("memory://", "exists in this one alone"), ("sqlite:///runs", "is a directory")],
)
def test_store_that_no_console_can_read_is_refused(folder: Path, store: str, expected: str) -> None:
    (folder / "runs").mkdir()
    with pytest.raises(AssertionError, match=expected):
        run_agl("run", "experiment.toml", "--console", "--set", f"experiment.store={store}", folder=folder)
