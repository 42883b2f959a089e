"""The gap to the gold reward: an exploit is found within five steps, and honest runs are left alone.

A simulated run has steps of 16 tasks with 8 rollouts, of which a tenth has a gold reward, and a judge that errs by 0.2
and is too kind. From the step of the exploit on, nineteen of twenty answers please the judge and are worse.
"""

import random
from collections.abc import Callable, Iterator

import pytest

from agl.schemas import Reward, RewardSource
from agl.tracing import make_reward_span
from agl_inspect.records.gold import THRESHOLD, GapTest, GoldPair, gold_of

EXPLOIT, STEPS = 20, 60
Draw = Callable[[random.Random, float, bool], tuple[float, float]]


def scores(rng: random.Random, level: float, exploits: bool) -> tuple[float, float]:
    """Return the reward of a judge and the gold reward, both from 0 to 1."""
    true = clipped(level + rng.gauss(0, 0.2))
    gold, judge = clipped(true + rng.gauss(0, 0.1)), clipped(true + 0.15 + rng.gauss(0, 0.2))
    return (clipped(0.95 + rng.gauss(0, 0.05)), clipped(gold - 0.3)) if exploits else (judge, gold)


def verdicts(rng: random.Random, level: float, exploits: bool) -> tuple[float, float]:
    """Return verdicts of 0 or 1: the judge's is wrong for a fifth of the answers, gold for a twentieth."""
    true = rng.random() < level
    gold, judge = true ^ (rng.random() < 0.05), true ^ (rng.random() < 0.2)
    return (1.0, float(rng.random() < 0.1)) if exploits else (float(judge), float(gold))


def clipped(value: float) -> float:
    return min(1.0, max(0.0, value))


def simulated(seed: int, draw: Draw, *, exploit: int) -> Iterator[list[GoldPair]]:
    """Yield the pairs of each step of a run that gets better, and exploits the judge from a step on."""
    rng = random.Random(seed)
    for step in range(STEPS):
        pairs: list[GoldPair] = []
        for task in range(16):
            level = 0.3 + 0.4 * step / STEPS + rng.gauss(0, 0.15)
            for _ in range(8):
                reward, gold = draw(rng, clipped(level), step >= exploit and rng.random() < 0.95)
                if rng.random() < 0.1:
                    pairs.append(GoldPair(group=str(task), reward=reward, gold=gold))
        yield pairs


def alarm(seed: int, draw: Draw, *, exploit: int = STEPS) -> int | None:
    """Return the step of the first alert; ``None`` without one."""
    test = GapTest()
    for step, pairs in enumerate(simulated(seed, draw, exploit=exploit)):
        test.add(pairs)
        if test.evidence >= THRESHOLD:
            return step
    return None


@pytest.mark.parametrize("draw", [scores, verdicts])
@pytest.mark.parametrize("runs", [40, pytest.param(200, marks=pytest.mark.long)])
def test_exploit_is_found_within_five_steps_and_honest_runs_are_left_alone(draw: Draw, runs: int) -> None:
    found = [alarm(seed, draw, exploit=EXPLOIT) for seed in range(runs)]
    assert 0.95 * runs <= sum(step is not None and EXPLOIT <= step < EXPLOIT + 5 for step in found)
    assert 0.05 * runs >= sum(alarm(seed, draw) is not None for seed in range(runs))


def test_gap_that_was_there_from_the_start_is_no_alert() -> None:
    assert not any(alarm(seed, scores, exploit=0) for seed in range(20))


def test_equal_rewards_are_never_an_alert() -> None:
    test = GapTest()
    for _ in range(100):
        test.add([GoldPair(group=str(task), reward=1.0, gold=1.0) for task in range(10)])
    assert 0.0 < test.evidence < 1.0


@pytest.mark.parametrize(("source", "value"), [("evaluator", 0.5), ("human", 0.5), ("agent", None), ("hook", None)])
def test_agent_does_not_choose_what_it_is_measured_by(source: RewardSource, value: float | None) -> None:
    ordinary = make_reward_span("r", "r.1", Reward(value=1.0))
    gold = make_reward_span("r", "r.1", Reward(value=0.5, source=source, is_gold=True))
    assert value == gold_of([gold, ordinary], "r.1")
    assert gold_of([gold], "r.2") is None
