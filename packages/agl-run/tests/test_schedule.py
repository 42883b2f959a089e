"""The order of steps, unbroken and over a restart."""

import asyncio
from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from agl_run.experiment.schedule import alternate


class Counted:
    """A turn that is finished after ``length`` steps."""

    def __init__(self, label: str, *, length: int, steps: int) -> None:
        self.label, self.steps = label, steps
        self._length = length

    @property
    def is_finished(self) -> bool:
        return self.steps >= self._length

    async def begin(self) -> None: ...

    async def step(self) -> None:
        self.steps += 1

    async def end(self) -> None: ...


class StoppedError(Exception):
    """The process ends here."""


def order(lengths: list[int], *, every: int, steps: list[int], stop: int | None = None) -> list[str]:
    """The labels of the steps that are taken, ``stop`` of them at most; ``steps`` were taken before."""
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
                found.append(turn.label)
        if len(found) == stop:
            raise StoppedError

    with suppress(StoppedError):
        asyncio.run(alternate(turns, every=every, after_step=note))
    return found


@settings(deadline=None, max_examples=50)
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
