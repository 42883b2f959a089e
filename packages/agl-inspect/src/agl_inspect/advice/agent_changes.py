"""Compares each agent of a run before and after training.

Where the run was validated, the agent's rollouts in the first validation are compared with those in the newest one. In
a team whose agents all take part in every rollout these rewards are the same for all; the credit of an agent's own
calls tells them apart, and is compared between the first and the last quarter of the training steps. The intervals are
Welch's, which takes rollouts and calls as independent; those of one task are not quite, so they are a little narrow.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Literal

from agl.contracts import Moments
from agl.schemas import Record
from agl_inspect.advice.suggestions import VALIDATE
from agl_inspect.rollouts.step_tallies import AgentTally, StepTally
from agl_inspect.statistics import student_quantile
from agl_inspect.text import ends

FEWEST = 5
"""The least number of values on either side of a verdict."""


class AgentChange(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The change of an agent's reward or credit over a run.

    Attributes:
        agent: The agent's name, ``""`` for calls outside of any agent.
        verdict: ``unclear`` if the 95 % interval of the difference contains 0, or if there are too few values.
        words: The change as a clause that follows the agent's name.
    """

    agent: str
    verdict: Literal["better", "worse", "unclear"]
    words: str


def agent_changes(tallies: Sequence[StepTally]) -> list[AgentChange]:
    """Return how the agents of a run changed, by its tallies: those that got worse first."""
    validations = sorted((t for t in tallies if t.mode == "val" and t.algorithm == VALIDATE), key=lambda t: t.step)
    steps = sorted((t for t in tallies if t.mode == "train"), key=lambda t: t.step)
    quarter = max(1, len(steps) // 4)
    found: list[AgentChange] = []
    if len(validations) > 1:
        sides = validations[:1], validations[-1:]
        found += _changes(*sides, lambda each: each.reward, "the reward of its rollouts", "validation", "rollouts")
    if len(steps) > 1:
        sides = steps[:quarter], steps[-quarter:]
        found += _changes(*sides, lambda each: each.credit, "the credit of its answers", "quarter of steps", "answers")
    return sorted(found, key=lambda each: ("worse", "better", "unclear").index(each.verdict))


def _changes(
    first: Sequence[StepTally],
    last: Sequence[StepTally],
    value: Callable[[AgentTally], Moments],
    subject: str,
    place: str,
    things: str,
) -> Iterator[AgentChange]:
    before, after = _sums(first, value), _sums(last, value)
    for agent in (agent for agent in before if agent in after):
        old, new = before[agent], after[agent]
        low, high = _interval(old, new)
        verdict = "better" if low > 0 else "worse" if high < 0 else "unclear"
        lead = {"better": "got better", "worse": "got worse", "unclear": f"cannot be judged with so few {things}"}
        if verdict == "unclear" and min(old.count, new.count) >= FEWEST:
            lead = {"unclear": "did not change clearly"}
        words = (
            f"{lead[verdict]}: {subject} was {old.mean:.3g} in the first {place} and is {new.mean:.3g} in the last "
            f"one, a difference of {new.mean - old.mean:+.3g}{ends(low, high, '+.3g')} over {old.count:,} and "
            f"{new.count:,} {things}"
        )
        yield AgentChange(agent=agent, verdict=verdict, words=words)


def _sums(tallies: Sequence[StepTally], value: Callable[[AgentTally], Moments]) -> dict[str, Moments]:
    """Merge a value over tallies, by agent, for the agents that have one."""
    agents = {each.agent for tally in tallies for each in tally.agents}
    own = {name: [value(each) for t in tallies for each in t.agents if each.agent == name] for name in sorted(agents)}
    merged = {name: reduce(Moments.plus, found, Moments()) for name, found in own.items()}
    return {name: moments for name, moments in merged.items() if moments.count}


def _interval(old: Moments, new: Moments) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two means; infinite for fewer than ``FEWEST`` values."""
    if min(old.count, new.count) < FEWEST:
        return -math.inf, math.inf
    parts = [each.squares / (each.count - 1) / each.count for each in (old, new)]
    apart, error = new.mean - old.mean, sum(parts)
    if not error:
        return apart, apart
    freedom = error**2 / sum(part**2 / (each.count - 1) for part, each in zip(parts, (old, new), strict=True))
    width = student_quantile(0.975, freedom) * math.sqrt(error)
    return apart - width, apart + width
