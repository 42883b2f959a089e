"""The guard ends the servers when the run ends, however the run ends."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from agl_testing.waiting import wait_until
from agl_vllm import guard

CHILD = """\
import os, subprocess, sys, time
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), below.pid, flush=True)
time.sleep(600)
"""


def is_alive(pid):
    """Return true if a process runs; one that has ended but was not waited for does not run."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_gone(pids):
    wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_and_its_children_end_when_their_asker_is_killed(number):
    asker = textwrap.dedent(
        f"""\
        import subprocess, sys
        words = [sys.executable, {guard.__file__!r}, sys.executable, "-c", {CHILD!r}]
        subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True).wait()
        """
    )
    with subprocess.Popen([sys.executable, "-c", asker], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert all(map(is_alive, pids))
        process.send_signal(number)
        wait_gone(pids)


def test_the_exit_code_is_the_programs_and_its_children_do_not_stay():
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.exit(3)"
    words = [sys.executable, guard.__file__, sys.executable, "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert 3 == process.wait(60)
        wait_gone([pid])


@pytest.mark.long
def test_a_program_that_ignores_the_request_to_stop_is_killed():
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    code = f"{deaf}; print('up', flush=True); time.sleep(600)"
    words = [sys.executable, guard.__file__, sys.executable, "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert b"up\n" == process.stdout.readline()
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert 128 + signal.SIGKILL == process.wait(30)
        assert guard.GRACE_S - 1 < time.monotonic() - started
