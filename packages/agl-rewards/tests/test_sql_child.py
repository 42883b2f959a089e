"""Queries that use up memory or time, or end their process, affect only themselves."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agl_rewards.sandbox import QueryError, QueryLimits, QueryRunner
from agl_testing.waiting import wait_until

from .cases import database

NUMBERS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 3000)"
MANY = f"{NUMBERS} SELECT zeroblob(9000000) FROM n"
SORTED = f"{NUMBERS} SELECT count(*) FROM (SELECT DISTINCT zeroblob(9000000 + x) FROM n)"
STUBBORN = "SELECT instr(hex(zeroblob(4900000)), hex(zeroblob(2400000)) || 'b')"
"""A single function call that runs for minutes and cannot be interrupted."""

needs_limits = pytest.mark.skipif(sys.platform != "linux", reason="the system does not limit a child's memory")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return database(tmp_path / "singers.sqlite")


def children() -> set[int]:
    """Return this process's child processes that run queries."""
    listing = subprocess.run(["ps", "-ww", "-e", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
    rows = [line.split(None, 2) for line in listing.stdout.splitlines()]
    return {int(pid) for pid, parent, words in rows if int(parent) == os.getpid() and "query_child" in words}


def peak_mb(pid: int) -> float:
    """Return the peak memory of a process in MB."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


@pytest.mark.long
@needs_limits
@pytest.mark.parametrize(("query", "reason"), [(MANY, "more than 64 MB"), (SORTED, "more than 512 MB of memory")])
def test_query_that_eats_memory_is_ended_before_it_harms_the_machine(path: Path, query: str, reason: str) -> None:
    before = children()
    runner = QueryRunner(QueryLimits(time_s=60))
    assert [(3,)] == runner.run(path, "SELECT count(*) FROM singer")
    (child,) = children() - before
    with pytest.raises(QueryError, match=reason):
        runner.run(path, query)
    assert not Path(f"/proc/{child}").exists() or peak_mb(child) < 550
    assert [(3,)] == runner.run(path, "SELECT count(*) FROM singer")


def test_query_that_cannot_be_interrupted_ends_with_its_child(path: Path) -> None:
    runner, before = QueryRunner(QueryLimits(time_s=0.3)), children()
    started = time.monotonic()
    with pytest.raises(QueryError, match=r"stopped after 0\.3 s"):
        runner.run(path, STUBBORN)
    assert time.monotonic() - started < 60
    wait_until(lambda: children() == before)
    assert [(3,)] == runner.run(path, "SELECT count(*) FROM singer")


def test_child_serves_many_queries_and_ends_with_its_runner(path: Path) -> None:
    before = children()
    runner = QueryRunner(QueryLimits())
    for number in range(20):
        assert [(number,)] == runner.run(path, f"SELECT {number}")
    assert 1 == len(children() - before)
    del runner
    assert before == children()


def test_killed_child_costs_no_query(path: Path) -> None:
    before = children()
    runner = QueryRunner(QueryLimits())
    runner.run(path, "SELECT 1")
    (child,) = children() - before
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: not _runs(child))
    assert [(1,)] == runner.run(path, "SELECT 1")


def test_values_of_every_type_come_back_as_sqlite_gives_them(path: Path) -> None:
    row = (None, -(2**63), 1.5, float("inf"), "ü \U0001f600", b"\x00\xff", "")
    query = "SELECT NULL, -9223372036854775807 - 1, 1.5, 9e999, 'ü \U0001f600', x'00ff', ''"
    assert [row] == QueryRunner(QueryLimits()).run(path, query)


def test_child_gets_no_keys(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    before = children()
    runner = QueryRunner(QueryLimits())
    runner.run(path, "SELECT 1")
    (child,) = children() - before
    listing = subprocess.run(["ps", "eww", "-p", str(child)], capture_output=True, text=True, check=True).stdout
    assert "query_child" in listing
    assert "sk-secret" not in listing


def test_stubborn_query_outlives_a_killed_parent_by_seconds_only(path: Path, tmp_path: Path) -> None:
    script = (
        "import sys, pathlib\n"
        "from agl_rewards.sandbox import QueryLimits, QueryRunner\n"
        f"QueryRunner(QueryLimits(time_s=1)).run(pathlib.Path({str(path)!r}), {STUBBORN!r})\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    found: set[int] = set()

    def started() -> bool:
        found.update(_children_of(parent.pid))
        return bool(found)

    wait_until(started)
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(_runs(pid) for pid in found), within_s=20)


def _children_of(pid: int) -> set[int]:
    listing = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return {int(line.split()[0]) for line in listing.splitlines() if int(line.split()[1]) == pid}


def _runs(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")
