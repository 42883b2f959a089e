"""Counting tests in the output and the reports of test runners."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from agl_harness.workspace_tests import Tally, tally_of_output, tally_of_report

NODE = "TAP version 13\n# tests 3\n# pass 2\n# fail 1\n# skipped 0\n"
SUBTESTS = (
    "FAIL: test_a (m.T.test_a) (i=1)\n\nFAIL: test_a (m.T.test_a) (i=2)\n\nFAIL: test_b (m.T.test_b)\nWhat it does\n"
)
CARGO = "test result: ok. 3 passed; 0 failed; 0 ignored\n\ntest result: FAILED. 1 passed; 2 failed; 0 ignored\n"
GO = "=== RUN   TestA\n--- PASS: TestA (0.00s)\n--- FAIL: TestB (0.00s)\nFAIL\n"


@pytest.mark.parametrize(
    ("text", "tally"),
    [
        ("..F\nRan 3 tests in 0.001s\n\nFAILED (failures=1)\n", (2, 3)),
        ("Ran 4 tests in 0.001s\n\nFAILED (failures=1, errors=1, skipped=1)\n", (1, 3)),
        ("Ran 1 test in 0.000s\n\nOK\n", (1, 1)),
        ("Ran 3 tests in 0.000s\n\nOK (skipped=1, expected failures=2)\n", (2, 2)),
        ("Ran 3 tests in 0.000s\n\nFAILED (unexpected successes=1)\n", (2, 3)),
        (f"{SUBTESTS}\nRan 3 tests in 0.001s\n\nFAILED (failures=3)\n", (1, 3)),
        ("Ran 0 tests in 0.000s\n\nNO TESTS RAN\n", (0, 0)),
        ("===== 1 failed, 2 passed, 1 skipped in 0.12s =====\n", (2, 3)),
        ("3 passed in 0.01s\n", (3, 3)),
        ("2 failed, 3 passed, 1 xfailed, 5 subtests passed, 1 warning in 4.58s\n", (3, 5)),
        ("\x1b[31m=== \x1b[1m1 error\x1b[0m\x1b[31m in 0.05s\x1b[0m ===\n", (0, 1)),
        (NODE, (2, 3)),
        (NODE.replace("#", "\u2139"), (2, 3)),
        (NODE.replace("# skipped 0", "# cancelled 2"), (2, 5)),
        (CARGO, (4, 6)),
        (GO, (1, 2)),
        ("all is well\n", None),
        ("", None),
    ],
)
def test_output_is_counted(text: str, tally: tuple[int, int] | None) -> None:
    assert (None if tally is None else Tally(passed=tally[0], total=tally[1])) == tally_of_output(text)


@pytest.mark.parametrize("text", ["\n", "=", " ", "=\n", "1 a, ", "a", "1"])
def test_long_output_of_any_kind_is_counted_at_once(text: str) -> None:
    started = time.perf_counter()
    for before in ("", "Ran 1 test in 1s\n", "Ran ", "test result: ok. "):
        tally_of_output(f"{before}{text * 10_000} tests in 1s")
    assert time.perf_counter() - started < 2


@pytest.mark.long
def test_pytest_s_own_output_and_report_agree(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pytest.skip()\n"
        "@pytest.fixture\ndef broken(): raise ValueError\ndef test_d(broken): pass\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--junitxml=report.xml",
        "-c",
        "/dev/null",
        ".",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    expected = Tally(passed=1, total=3)
    assert expected == tally_of_output(done.stdout)
    assert expected == tally_of_report((tmp_path / "report.xml").read_bytes())


@pytest.mark.parametrize("data", [b"", b"<a>", b'<!DOCTYPE x [<!ENTITY a "b">]><x>&a;</x>', b"\xff"])
def test_report_that_is_none_counts_nothing(data: bytes) -> None:
    assert tally_of_report(data) is None
