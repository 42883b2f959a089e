"""``python -m benchmarks.falls``: how often a run reacts to falls of its validation reward, to one and to two in a row.

A run validates the same tasks again and again, with rewards of 0 or 1. The success rate of a task is drawn from a beta
distribution with mean 0.6. In the first table the policy does not change or goes up and down, so that a reaction is an
error; in the second one, the success rates fall after ten validations, and the run has four more to see it.
The rule is that of `agl_inspect.records.validations`. Takes a minute, and needs no package but ours.
"""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from agl.acceptance import BETS
from agl_inspect.records.validations import FALL_ODDS

SEED = 38
UNCHANGED = 10
"""Number of validations before a fall."""


@dataclass(frozen=True, kw_only=True)
class World:
    """One kind of run.

    Attributes:
        tasks: Number of validation tasks.
        validations: Number of validations.
        jitter: Standard deviation of the real changes of all success rates from one validation to the next.
        fall: The loss of all success rates from validation number ``UNCHANGED`` on.
        runs: Number of simulated runs.
    """

    tasks: int
    validations: int
    jitter: float = 0.0
    fall: float = 0.0
    runs: int = 400


STEADY = [
    *(World(tasks=tasks, validations=20) for tasks in (20, 50, 200, 1000)),
    *(World(tasks=tasks, validations=100) for tasks in (50, 200)),
    *(World(tasks=tasks, validations=30, jitter=0.02, runs=200) for tasks in (50, 200)),
]
FALLING = [
    World(tasks=tasks, validations=UNCHANGED + 4, fall=fall, runs=200)
    for tasks in (20, 50, 200)
    for fall in (0.2, 0.4, 0.8)
]


@cache
def odds(worse: int, better: int) -> float:
    """Return the evidence of harm after so many differences of -1 and of +1; those of 0 do not count."""
    return math.fsum((1 + bet) ** worse * (1 - bet) ** better for bet in BETS) / len(BETS)


def validate(world: World, rates: Sequence[float], number: int, generator: random.Random) -> list[int]:
    """Return the rewards of validation ``number``, from 0."""
    shift = generator.gauss(0.0, world.jitter) - (world.fall if number >= UNCHANGED else 0.0)
    return [int(generator.random() < rate + shift) for rate in rates]


def reactions(world: World, generator: random.Random) -> tuple[bool, bool]:
    """Return whether a validation of a run has fallen, and whether two in a row have."""
    rates = [generator.betavariate(1.2, 0.8) for _ in range(world.tasks)]
    best = validate(world, rates, 0, generator)
    falls = [False]
    for number in range(1, world.validations):
        now = validate(world, rates, number, generator)
        pairs = list(zip(best, now, strict=True))
        falls.append(odds(pairs.count((1, 0)), pairs.count((0, 1))) >= FALL_ODDS)
        best = max(now, best, key=sum)
    return any(falls), any(one and other for one, other in itertools.pairwise(falls))


def show(title: str, worlds: Sequence[World], generator: random.Random) -> None:
    """Print how many runs of each world react, as a table."""
    print(f"\n| {title}: tasks | validations | jitter | fall | runs | one fall | two in a row |\n|{'---|' * 7}")
    for world in worlds:
        found = [reactions(world, generator) for _ in range(world.runs)]
        once, twice = (sum(each) for each in zip(*found, strict=True))
        facts = (world.tasks, world.validations, world.jitter, world.fall, world.runs, once, twice)
        print(f"| {' | '.join(map(str, facts))} |", flush=True)


if __name__ == "__main__":
    drawn = random.Random(SEED)
    show("error", STEADY, drawn)
    show("power", FALLING, drawn)
