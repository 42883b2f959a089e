"""Runs the trial of a forecast: adds tasks until a step's tokens are known well enough or the time is up."""

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import click

from agl.hints import count_of
from agl.schemas import Json
from agl_inspect.forecast.queueing import uncertainty_of
from agl_inspect.records.names import TRIAL
from agl_inspect.text import visible
from agl_run.display.progress import Progress
from agl_run.forecast.recorded import Material, find_trial, read
from agl_run.plan import Plan
from agl_run.run.trial import Tasks, trial

SURE = 0.05
"""A trial ends when half the 95 % interval of a step's tokens is at most this share of the tokens."""

FIRST = 8
"""The number of tasks that a trial runs before it first checks the uncertainty."""

_GROWTH = 4
"""The most tasks that one round adds, as a multiple of the tasks run so far: the spread of few tasks is uncertain."""


@dataclass(frozen=True, kw_only=True)
class TrialSize:
    """The size of a trial.

    Attributes:
        tasks: The number of tasks; ``None`` to add tasks until the tokens are known well enough.
        samples: Rollouts of each task.
        seconds: Time after which no tasks are added.
    """

    tasks: int | None = None
    samples: int = 2
    seconds: float = 35.0


async def try_out(plan: Plan, size: TrialSize, *, progress: Progress) -> Material:
    """Run a trial as the experiment ``NAME-dev``, and read it; raises :class:`RunError` if every rollout failed."""
    known = plan.train or plan.val
    draw = random.Random(plan.config.experiment.seed)  # any tasks, and the same ones again
    order = draw.sample(known, k=len(known))
    started = time.monotonic()
    async with trial(plan, record_as=f"{plan.name}{TRIAL}", progress=progress) as driver:
        tasks = Tasks(driver)
        wanted, done = order[: size.tasks or FIRST], 0
        while True:
            _say(wanted, size, is_first=not done)
            begun = time.monotonic()
            await tasks.run(wanted, samples=size.samples, mode="train")
            took, done = time.monotonic() - begun, done + len(wanted)
            store = driver.running.store
            material = await read(store, plan, *await find_trial(store, plan))
            left = size.seconds - (time.monotonic() - started)
            count = 0 if size.tasks else _further(material, done, tasks=len(known), most=left / took * len(wanted))
            wanted = order[done : done + count]
            if not wanted:
                return material


def _further(material: Material, done: int, *, tasks: int, most: float) -> int:
    """Return how many tasks to add to make the tokens certain enough, at most ``most``."""
    found = [uncertainty_of(observed, tasks=tasks) for observed in material.observed.values()]
    unsure = max((each for each in found if each is not None), default=0.0)
    if unsure <= SURE:
        return 0
    # The width of an interval falls with the root of the number of tasks.
    needed = math.ceil(done * min((unsure / SURE) ** 2, 1 + _GROWTH)) - done
    return max(0, min(needed, math.floor(most)))


def _say(tasks: Sequence[Json], size: TrialSize, *, is_first: bool) -> None:
    count = len(tasks)
    each = f"{count_of(count, 'task')} x {size.samples}"
    text = (
        f"running {count_of(count * size.samples, 'rollout')} ({each}), which call the model; Ctrl-C ends them"
        if is_first
        else f"running {count * size.samples} more ({each}), for the tokens of a step are not sure yet"
    )
    click.echo(visible(text), err=True)
