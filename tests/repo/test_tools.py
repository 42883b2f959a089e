"""The runner of sessions side by side, and the count of mutants."""

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from agl_testing.waiting import wait_until
from tools.mutants._report import Mutant, Report
from tools.side_by_side import SideBySide, longest_first, read_times, summary, time_for, try_failed_again

ROOT = Path(__file__).parents[2]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_longest_sessions_start_first_and_unknown_ones_count_half_a_minute() -> None:
    assert ["b", "new", "a"] == longest_first(["a", "b", "new"], {"a": 20.0, "b": 40.0})


@pytest.mark.parametrize(
    ("seconds", "lanes", "expected"), [([3, 2, 1], 2, 3), ([3, 2, 2], 2, 4), ([3, 2, 2], 1, 7), ([3], 4, 3)]
)
def test_time_is_that_of_the_lane_that_ends_last(seconds: list[float], lanes: int, expected: float) -> None:
    assert expected == time_for(seconds, lanes=lanes)


def test_every_session_that_is_run_has_its_time() -> None:
    text = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    for name in read_times():
        assert name.partition("-3.")[0].partition("(")[0] in text, f"{name} is no session; remove it from times.toml"


def test_output_is_shown_of_what_failed_and_of_nothing_else(tmp_path: Path) -> None:
    codes = {"good": "print('all is well')", "bad": "print('it broke'); raise SystemExit(3)"}
    said: list[str] = []
    runner = SideBySide(list(codes), lanes=2, command=lambda name: python(codes[name]), logs=tmp_path)
    ended = runner.run(said.append)
    text = "\n".join(said)
    assert {"good": 0, "bad": 3} == {one.name: one.status for one in ended}
    assert "2 sessions, 2 at a time: about 0 minutes on two idle cores" in text
    assert "it broke" in text
    assert "all is well" not in text
    assert "all is well\n" == (tmp_path / "good.log").read_text()
    told = summary(ended, seconds=61.0)
    assert told.startswith("1 of 2 sessions passed in 1:01; 1 failed. Repeat with:\n")
    assert 'python3 -m nox -s "bad"' in told
    assert "good" not in told


@pytest.mark.parametrize(
    ("names", "codes", "told"),
    [
        (["luck"], {"luck": 0}, "1 of 1 sessions passed in 0:09\n1 passed only in the second try"),
        (["luck", "bad"], {"luck": 0, "bad": 1}, '    python3 -m nox -s "bad" '),
        (["luck", "bad", "bad2"], {"luck": 1, "bad": 1, "bad2": 1}, "0 of 3 sessions passed in 0:09; 3 failed."),
        (["good"], {"good": 0}, "1 of 1 sessions passed in 0:09"),
    ],
)
def test_one_or_two_sessions_that_failed_get_a_second_try_and_are_named(
    tmp_path: Path, names: list[str], codes: dict[str, int], told: str
) -> None:
    def session(name: str, *, try_number: int) -> list[str]:
        return python(f"raise SystemExit({int('bad' in name or ('luck' in name and try_number == 1))})")

    runner = SideBySide(names, lanes=2, command=partial(session, try_number=1), logs=tmp_path)
    ended = try_failed_again(
        runner.run(lambda _: None), lambda _: None, command=partial(session, try_number=2), logs=tmp_path
    )
    assert codes == {one.name: one.status for one in ended}
    said = summary(ended, seconds=9.0)
    assert told in said
    assert (f"    luck: {tmp_path / 'luck.log'}" in said) == ("luck" in names and not codes["luck"])


DRIVER = """
import sys
from pathlib import Path
from tools.side_by_side import SideBySide

codes = {f"s{n}": "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)" for n in range(4)}
command = lambda name: [sys.executable, "-c", codes[name]]
SideBySide(list(codes), lanes=2, command=command, logs=Path(sys.argv[1])).run(print)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="process groups are those of POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_what_runs_and_starts_nothing_more(tmp_path: Path, number: signal.Signals) -> None:
    def pids() -> list[int]:
        return [int(text) for file in tmp_path.glob("*.log") if (text := file.read_text().partition("\n")[0])]

    process = subprocess.Popen(
        [*python(DRIVER), str(tmp_path)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    running = wait_until(lambda: found if len(found := pids()) == 2 else [])
    process.send_signal(number)
    assert 0 != process.wait(60)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in running))
    assert running == pids()


def mutant(status: str, now: str, *, module: str = "rows") -> Mutant:
    return Mutant(name=f"m.{now}", module=module, where=f"{module}.f", was="x", now=now, status=status)


def test_report_leaves_out_what_changes_nothing() -> None:
    mutants = [mutant("killed", "a"), mutant("timeout", "b"), mutant("survived", "c"), mutant("no tests", "d")]
    report = Report(mutants, {("rows.f", "c"): "why"})
    assert ["d"] == [found.now for found in report.survivors()]
    assert "all               4        2           1         1   66.7%" in report.table()
    assert not report.is_good
    assert Report(mutants[:3], {("rows.f", "c"): "why"}).is_good


def test_report_names_entries_that_are_wrong() -> None:
    known = {("rows.f", "a"): "noticed after all", ("rows.f", "z"): "the code is another one now"}
    report = Report([mutant("killed", "a")], known)
    assert [
        "rows.f: 'a' is noticed by a test; remove it from equivalent.toml",
        "rows.f: 'z' is no mutant any more; remove it from equivalent.toml",
    ] == report.wrong_entries()
    assert not report.is_good
