"""Runs algorithms one after the other, in turns or side by side, those named first before the others."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from agl_run.experiment.config import ScheduleConfig


class Turn(Protocol):
    """One algorithm, as the schedule sees it."""

    is_finished: bool

    @property
    def name(self) -> str:
        """Its name within the experiment."""
        ...

    @property
    def steps(self) -> int:
        """Steps that it took, those before a restart included."""
        ...

    async def begin(self) -> None:
        """Set up and restore; idempotent."""
        ...

    async def step(self) -> None:
        """One step, saved when it returns."""
        ...

    async def end(self) -> None:
        """Release; idempotent."""
        ...


async def run_schedule(
    turns: Sequence[Turn], schedule: ScheduleConfig, *, after_step: Callable[[], Awaitable[None]]
) -> None:
    """Those of ``schedule.first`` to their end, then the others as its mode says."""
    first = [turn for turn in turns if turn.name in schedule.first]
    rest = [turn for turn in turns if turn.name not in schedule.first]
    try:
        await sequential(first, after_step=after_step)
        if schedule.mode == "sequential":
            await sequential(rest, after_step=after_step)
        elif schedule.mode == "alternate":
            await alternate(rest, every=schedule.every, after_step=after_step)
        else:
            await concurrent(rest, after_step=after_step)
    finally:
        for turn in turns:
            await turn.end()


async def sequential(turns: Sequence[Turn], *, after_step: Callable[[], Awaitable[None]]) -> None:
    """One after the other, each to its end; a resource passes from one to the next with its newest version."""
    for turn in turns:
        if turn.is_finished:
            continue
        try:
            await turn.begin()
            while not turn.is_finished:
                await turn.step()
                await after_step()
        finally:
            await turn.end()


async def alternate(turns: Sequence[Turn], *, every: int, after_step: Callable[[], Awaitable[None]]) -> None:
    """``every`` steps each in turn until all are finished; after a restart in the order of an unbroken run."""
    taken = [turn.steps for turn in turns]
    position = 0
    try:
        while not all(turn.is_finished for turn in turns):
            index = (position // every) % len(turns)
            position += 1
            if taken[index]:  # a step from before the restart
                taken[index] -= 1
            elif not turns[index].is_finished:
                await turns[index].begin()
                await turns[index].step()
                await after_step()
    finally:
        for turn in turns:
            await turn.end()


async def concurrent(turns: Sequence[Turn], *, after_step: Callable[[], Awaitable[None]]) -> None:
    """All at once; the first failure stops the others."""

    async def run(turn: Turn) -> None:
        try:
            await turn.begin()
            while not turn.is_finished:
                await turn.step()
                await after_step()
        finally:
            await turn.end()

    try:
        async with asyncio.TaskGroup() as group:
            for turn in turns:
                if not turn.is_finished:
                    group.create_task(run(turn))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures
