"""The order of steps, in an unbroken run and after a restart."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_run.config.sections import ScheduleConfig
from agl_run.run.schedule import alternate, concurrent, run_schedule


class Counted:
    """An algorithm that is finished after ``length`` steps."""

    def __init__(self, name: str, *, length: int, steps: int) -> None:
        self.name, self.steps = name, steps
        self._length = length

    @property
    def is_finished(self) -> bool:
        return self.steps >= self._length

    async def begin(self) -> None: ...

    async def step(self) -> None:
        self.steps += 1

    async def end(self) -> None: ...


class StoppedError(Exception):
    """Stands for the end of the process."""


def order(lengths: list[int], *, every: int, steps: list[int], stop: int | None = None) -> list[str]:
    """Return the labels of at most ``stop`` steps, after ``steps`` steps that were taken before."""
    turns = [
        Counted(str(index), length=length, steps=taken)
        for index, (length, taken) in enumerate(zip(lengths, steps, strict=True))
    ]
    found: list[str] = []
    before = list(steps)

    async def note() -> None:
        for index, turn in enumerate(turns):
            if turn.steps > before[index]:
                before[index] = turn.steps
                found.append(turn.name)
        if len(found) == stop:
            raise StoppedError

    with suppress(StoppedError):
        asyncio.run(alternate(turns, every=every, after_step=note))
    return found


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    every=st.integers(1, 3),
    data=st.data(),
)
def test_turns_after_a_restart_come_in_the_order_of_an_unbroken_run(
    lengths: list[int], every: int, data: st.DataObject
) -> None:
    unbroken = order(lengths, every=every, steps=[0] * len(lengths))
    assert sorted(unbroken) == [str(index) for index, length in enumerate(lengths) for _ in range(length)]

    stop = data.draw(st.integers(1, len(unbroken)))
    first = order(lengths, every=every, steps=[0] * len(lengths), stop=stop)
    rest = order(lengths, every=every, steps=[first.count(str(index)) for index in range(len(lengths))])

    assert unbroken == first + rest


def test_turns_of_several_steps() -> None:
    assert list("0011001") == order([4, 3], every=2, steps=[0, 0])


class Noted:
    """An algorithm that logs its calls, and fails at the step ``fails_at``."""

    def __init__(self, name: str, log: list[str], *, length: int = 1, steps: int = 0, fails_at: int = 0) -> None:
        self.name, self.steps = name, steps
        self._log, self._length, self._fails_at = log, length, fails_at

    @property
    def is_finished(self) -> bool:
        return self.steps >= self._length

    async def begin(self) -> None:
        self._log.append(f"begin {self.name}")

    async def step(self) -> None:
        self.steps += 1
        if self.steps == self._fails_at:
            raise StoppedError(self.name)
        self._log.append(f"step {self.name}{self.steps}")
        await asyncio.sleep(0)

    async def end(self) -> None:
        self._log.append(f"end {self.name}")


def played(schedule: ScheduleConfig, turns: Sequence[Noted], log: list[str]) -> list[str]:
    """Return the steps until the end or the first failure, with ``.`` after each saved step."""

    async def after_step() -> None:
        log.append(".")

    with suppress(StoppedError):
        asyncio.run(run_schedule(turns, schedule, after_step=after_step))
    return log


def labels(log: Sequence[str]) -> str:
    """Return the algorithms that took steps, in order."""
    return "".join(word.removeprefix("step ")[0] for word in log if word.startswith("step "))


def test_sequential_turns_run_each_to_its_end() -> None:
    log: list[str] = []
    expected = ["begin a", "step a1", ".", "step a2", ".", "end a", "begin b", "step b1", ".", "end b"]
    turns = [Noted("a", log, length=2), Noted("b", log)]
    assert [*expected, "end a", "end b"] == played(ScheduleConfig(), turns, log)


def test_turns_that_are_finished_are_not_begun_again() -> None:
    for mode in ("sequential", "alternate", "concurrent"):
        log: list[str] = []
        turns = [Noted("a", log, steps=1), Noted("b", log)]
        played(ScheduleConfig(mode=mode), turns, log)
        assert ["begin b", "step b1", "."] == [word for word in log if not word.startswith("end")]
        assert {"end a", "end b"} <= set(log)


@pytest.mark.parametrize(
    ("first", "mode", "expected"),
    [
        ((), "alternate", "abcabcabc"),
        ("b", "alternate", "bbbacacac"),
        (("c", "b"), "alternate", "bbbcccaaa"),
        ("c", "sequential", "cccaaabbb"),
        ("c", "concurrent", "cccababab"),
        (("a", "b", "c"), "concurrent", "aaabbbccc"),
    ],
)
def test_firsts_run_to_their_end_before_the_others_in_the_order_of_the_file(
    first: str | tuple[str, ...], mode: Literal["sequential", "alternate", "concurrent"], expected: str
) -> None:
    log: list[str] = []
    turns = [Noted(label, log, length=3) for label in "abc"]
    assert expected == labels(played(ScheduleConfig(mode=mode, first=first), turns, log))


@pytest.mark.parametrize(("every", "expected"), [(1, "ababab"), (2, "aabbab"), (3, "aaabbb")])
def test_alternating_turns_take_the_steps_that_the_schedule_says(every: int, expected: str) -> None:
    log: list[str] = []
    turns = [Noted(label, log, length=3) for label in "ab"]
    assert expected == labels(played(ScheduleConfig(mode="alternate", every=every), turns, log))


@pytest.mark.parametrize("mode", ["sequential", "alternate", "concurrent"])
def test_step_that_fails_is_not_saved_and_everything_is_released(
    mode: Literal["sequential", "alternate", "concurrent"],
) -> None:
    log: list[str] = []
    turns = [Noted("a", log, length=9, fails_at=2), Noted("b", log, length=9)]
    played(ScheduleConfig(mode=mode), turns, log)
    assert (1, True) == (labels(log).count("a"), labels(log).count("b") < 9)
    assert ["end a", "end b"] == log[-2:]


def test_first_failure_of_concurrent_turns_stops_the_others_and_is_raised_itself() -> None:
    log: list[str] = []
    turns = [Noted("a", log, length=99), Noted("b", log, length=99, fails_at=3)]

    async def after_step() -> None: ...

    with pytest.raises(StoppedError, match="b"):
        asyncio.run(concurrent(turns, after_step=after_step))
    assert labels(log).count("a") < 9
    assert ["end a", "end b"] == sorted(word for word in log if word.startswith("end"))
