"""Counts passed tests: in a report in JUnit's XML, or in what test runners print at their end."""

import re
from collections.abc import Callable
from xml.etree import ElementTree

from agl.schemas import Record

MAX_REPORT = 16 << 20
"""Bytes of a report at most."""


class Tally(Record, frozen=True, kw_only=True):
    """The tests of a run.

    Attributes:
        passed: Number of tests that passed.
        total: Number of tests that ran or could not run; skipped ones do not count.
    """

    passed: int
    total: int


def tally_of_report(data: bytes) -> Tally | None:
    """Count the test cases of a JUnit report; ``None`` for anything else, or one that is too large."""
    if len(data) > MAX_REPORT or b"<!DOCTYPE" in data:
        return None
    try:
        cases = list(ElementTree.fromstring(data).iter("testcase"))
    except ElementTree.ParseError:
        return None
    results = [{child.tag for child in case} for case in cases]
    ran = [tags for tags in results if "skipped" not in tags]
    return Tally(passed=sum(not tags & {"failure", "error"} for tags in ran), total=len(ran))


def tally_of_output(text: str) -> Tally | None:
    """Count the tests in the output of pytest, unittest, node, cargo, or ``go test -v``; ``None`` for other output."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return next((found for count in _COUNTS if (found := count(plain)) is not None), None)


def _unittest(text: str) -> Tally | None:
    ran = re.findall(r"^Ran (\d{1,9}) tests? in ", text, flags=re.MULTILINE)
    if not ran:
        return None
    last = text[text.rindex(f"Ran {ran[-1]} test") :]
    counts = {word: int(number) for word, number in re.findall(r"\b([a-z]+(?: [a-z]+)?)=(\d{1,9})", last)}
    bad = sum(counts.get(word, 0) for word in ("failures", "errors", "unexpected successes"))
    headings = re.findall(r"^(?:FAIL|ERROR|UNEXPECTED SUCCESS): (\S+ \(\S+\))", text, flags=re.MULTILINE)
    if len(headings) == bad:  # one test may fail in several subtests
        bad = len(set(headings))
    total = int(ran[-1]) - counts.get("skipped", 0)
    return Tally(passed=max(0, total - bad), total=max(total, bad))


def _pytest(text: str) -> Tally | None:
    lines = re.findall(r"^=* ?((?:\d{1,9} [a-z]+(?: [a-z]+)?(?:, )?)+) in [\d.]+s.*$", text, flags=re.MULTILINE)
    if not lines:
        return None
    counts = {word: int(number) for number, word in re.findall(r"(\d{1,9}) ([a-z]+(?: [a-z]+)?)", lines[-1])}
    passed = counts.get("passed", 0) + counts.get("xpassed", 0)
    bad = sum(counts.get(word, 0) for word in ("failed", "error", "errors"))
    return Tally(passed=passed, total=passed + bad)


def _node(text: str) -> Tally | None:
    lines = re.findall(r"^[#\u2139] (pass|fail|cancelled) (\d{1,9})$", text, flags=re.MULTILINE)
    found = {word: int(number) for word, number in lines}
    if not {"pass", "fail"} <= set(found):
        return None
    return Tally(passed=found["pass"], total=sum(found.values()))


def _cargo(text: str) -> Tally | None:
    found = re.findall(r"^test result: \w+\. (\d{1,9}) passed; (\d{1,9}) failed", text, flags=re.MULTILINE)
    passed, failed = (sum(int(pair[place]) for pair in found) for place in (0, 1))
    return Tally(passed=passed, total=passed + failed) if found else None


def _go(text: str) -> Tally | None:
    found = re.findall(r"^ *--- (PASS|FAIL): ", text, flags=re.MULTILINE)
    return Tally(passed=found.count("PASS"), total=len(found)) if found else None


_COUNTS: tuple[Callable[[str], Tally | None], ...] = (_unittest, _pytest, _node, _cargo, _go)
