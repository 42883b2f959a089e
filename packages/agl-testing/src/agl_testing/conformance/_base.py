"""The base of the conformance classes, and the test that keeps subclasses from weakening them silently.

A contract's class has flags for the capabilities that an implementation may lack; by default all are required. An
implementation lowers a flag in its subclass, where a reader sees it. A single test may be weakened only by overriding
it with an ``xfail`` that gives a reason.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar, cast

import pytest

T = TypeVar("T")

LIMIT_S = 30.0
"""Seconds that one test's coroutine may take; a test that waits for a lost wake-up fails instead of hanging."""


def run(work: Coroutine[Any, Any, T], *, limit_s: float = LIMIT_S) -> T:
    """Run ``work`` in a new event loop, and return its result; raises :class:`TimeoutError` after ``limit_s``."""
    return asyncio.run(asyncio.wait_for(work, limit_s))


class Conformance:
    """The base of the conformance classes; a subclass in a test file is named ``Test...`` and overrides one fixture."""

    contract: ClassVar[str] = ""
    """The contract's name, for messages."""

    def test_no_test_is_weakened_without_a_reason(self) -> None:
        """Every overridden test is marked ``xfail`` with a reason, and the class is marked neither skip nor xfail."""
        faults = [*_faults_of_tests(type(self)), *_faults_of_marks(type(self))]
        assert [] == faults


def require(condition: bool, flag: str, contract: str) -> None:
    """Skip the running test unless ``condition`` holds, because the subclass has lowered ``flag``."""
    if not condition:
        pytest.skip(f"this {contract} says {flag} = False")


def _faults_of_tests(cls: type) -> list[str]:
    own, theirs = _split(cls)
    names = {name for base in theirs for name in vars(base) if name.startswith("test_")}
    faults: list[str] = []
    for name in sorted(names):
        for override in (vars(base)[name] for base in own if name in vars(base)):
            if not any(mark.name == "xfail" and mark.kwargs.get("reason") for mark in _marks(override)):
                faults.append(f"{name} is overridden; mark the override xfail(reason=...) or remove it")
    return faults


def _faults_of_marks(cls: type) -> list[str]:
    own, _ = _split(cls)
    names = {mark.name for base in own for mark in _marks(base)}
    return [f"the class is marked {name}; mark single tests xfail instead" for name in sorted(names & _EXCUSES)]


def _split(cls: type) -> tuple[list[type], list[type]]:
    own = [base for base in cls.__mro__ if not base.__module__.startswith("agl_testing.conformance")]
    theirs = [base for base in cls.__mro__ if base.__module__.startswith("agl_testing.conformance")]
    return own, theirs


def _marks(target: object) -> list[pytest.Mark]:
    found: Any = vars(target).get("pytestmark", []) if hasattr(target, "__dict__") else []
    marks = cast("list[Any]", found if isinstance(found, list) else [found])
    return [getattr(mark, "mark", mark) for mark in marks]


_EXCUSES = {"skip", "skipif", "xfail"}
