"""One trainer per experiment: a dead holder never blocks another trainer, a live one always does."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agl.errors import ConfigError
from agl_run.run.running_experiment import ExperimentLock

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
HOLDER = """
import sys, time
from pathlib import Path
from agl_run.run.running_experiment import ExperimentLock
lock = ExperimentLock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
time.sleep(600)
"""
STARTER = """
import subprocess, sys
from pathlib import Path
from agl_run.run.running_experiment import ExperimentLock
lock = ExperimentLock(Path(sys.argv[1]))
lock.acquire()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
"""


FORKER = """
import os, sys, time
from pathlib import Path
from agl_run.run.running_experiment import ExperimentLock
lock = ExperimentLock(Path(sys.argv[1]))
lock.acquire()
child = os.fork()
if child == 0:
    os.close(1)
    time.sleep(600)
print(child, flush=True)
os._exit(0)
"""


def hold(workdir: Path) -> "subprocess.Popen[str]":
    """Start a process, and return it once it holds the lock."""
    command = [sys.executable, "-c", HOLDER, str(workdir)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "held\n" == process.stdout.readline()
    return process


def test_killed_holder_does_not_block_and_a_live_one_is_named(tmp_path):
    holder = hold(tmp_path)
    with pytest.raises(ConfigError, match=rf"process {holder.pid} runs this experiment already"):
        ExperimentLock(tmp_path).acquire()
    holder.kill()
    holder.communicate()
    assert str(holder.pid) == (tmp_path / "trainer.pid").read_text()
    ExperimentLock(tmp_path).acquire()


LEFT = {"parent": str(os.getppid()), "own": str(os.getpid()), "init": "1", "empty": "", "text": "no number"}


@pytest.mark.parametrize("left", LEFT.values(), ids=LEFT)
def test_file_that_names_a_process_which_lives_and_is_something_else_does_not_block(tmp_path, left):
    (tmp_path / "trainer.pid").write_text(left)
    lock = ExperimentLock(tmp_path)
    lock.acquire()
    assert str(os.getpid()) == (tmp_path / "trainer.pid").read_text()
    lock.release()


@pytest.mark.parametrize("program", [STARTER, pytest.param(FORKER, marks=needs_fork)], ids=["started", "forked"])
def test_process_that_outlives_its_trainer_does_not_block(tmp_path, program):
    command = [sys.executable, "-c", program, str(tmp_path)]
    child = int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    try:
        ExperimentLock(tmp_path).acquire()
    finally:
        os.kill(child, signal.SIGTERM)


def test_second_trainer_in_one_process_waits_for_the_release_of_the_first(tmp_path):
    first, second = ExperimentLock(tmp_path), ExperimentLock(tmp_path)
    first.acquire()
    with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        second.acquire()
    first.release()
    first.release()
    second.acquire()
    with pytest.raises(ConfigError, match="wait for it, or stop it"):
        first.acquire()
    second.release()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS], ids=["no locks left", "no locks at all"])
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no flock")
def test_file_system_without_locks_is_refused_with_the_remedy(tmp_path, monkeypatch, number):
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(ConfigError, match=r"trainer\.lock cannot be locked .* workdir to a folder on a local disk"):
        ExperimentLock(tmp_path).acquire()


def test_folder_that_cannot_be_made_is_not_reported_as_a_lock(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(OSError, match="No space left"):
        ExperimentLock(tmp_path / "work").acquire()


def test_lock_of_a_folder_that_was_removed_is_released(tmp_path):
    lock = ExperimentLock(tmp_path / "work")
    lock.acquire()
    shutil.rmtree(tmp_path / "work")
    lock.release()
