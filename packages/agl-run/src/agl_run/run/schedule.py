"""Runs algorithms sequentially, in turns or concurrently; algorithms in ``schedule.first`` run before the others."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from agl_run.config.sections import ScheduleConfig
from agl_run.run.algorithm import DrivenAlgorithm


async def run_schedule(
    turns: Sequence[DrivenAlgorithm], schedule: ScheduleConfig, *, after_step: Callable[[], Awaitable[None]]
) -> None:
    """Run the algorithms of ``schedule.first`` to their end, then the others in the schedule's mode."""
    # The order of the file counts in both lists.
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


async def sequential(turns: Sequence[DrivenAlgorithm], *, after_step: Callable[[], Awaitable[None]]) -> None:
    """Run the algorithms to their end, one after the other; each starts from the previous one's newest versions."""
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


async def alternate(turns: Sequence[DrivenAlgorithm], *, every: int, after_step: Callable[[], Awaitable[None]]) -> None:
    """Take ``every`` steps of each algorithm in turn until all are finished; a resumed run keeps the same order."""
    # The order of an unbroken run is replayed from its start without taking the steps that are
    # done, so a resumed run alternates as if it had never stopped.
    taken = [turn.steps for turn in turns]
    position = 0
    while not all(turn.is_finished for turn in turns):
        index = (position // every) % len(turns)
        position += 1
        if taken[index]:  # a step from before the restart
            taken[index] -= 1
        elif not turns[index].is_finished:
            await turns[index].begin()
            await turns[index].step()
            await after_step()


async def concurrent(turns: Sequence[DrivenAlgorithm], *, after_step: Callable[[], Awaitable[None]]) -> None:
    """Run all algorithms at once; the first failure stops the others."""

    async def run(turn: DrivenAlgorithm) -> None:
        try:
            await turn.begin()
            while not turn.is_finished:
                await turn.step()
                await after_step()
        finally:
            await turn.end()

    try:
        # The group cancels the others when one fails, and waits for them.
        async with asyncio.TaskGroup() as group:
            for turn in turns:
                if not turn.is_finished:
                    group.create_task(run(turn))
    except BaseExceptionGroup as failures:
        # A person gets the error itself; the group is its cause.
        raise failures.exceptions[0] from failures
