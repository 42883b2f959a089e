"""Means, intervals and whole runs with rewards whose sum is beyond the largest float."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl import AlgorithmEntry, PluginManager, Rollout, hookimpl
from agl.algorithms import algorithm
from agl.contracts import AlgorithmContext, Metric, StepReport
from agl.schemas import PromptTemplate
from agl_inspect.advice.suggestions import suggestions_of
from agl_inspect.records.validations import Validation, is_below
from agl_inspect.statistics.comparison import Comparison, compare, compare_tasks, interval
from agl_inspect.statistics.means import mean
from agl_run import Quiet, Trainer
from agl_store_sqlite._store import SQLiteStore

HUGE = 1e308
FINITE = st.floats(allow_nan=False, allow_infinity=False)


class Writing:
    """Publishes a prompt in every step, and reports the mean reward of its rollouts."""

    def __init__(self, *, steps: int) -> None:
        self._steps, self._step = steps, 0

    async def setup(self, context: AlgorithmContext) -> None:
        self._context = context

    async def step(self) -> StepReport:
        self._step += 1
        await self._context.collect(self._context.train, step=self._step)
        prompt = PromptTemplate(template=f"step {self._step}")
        await self._context.publish(self._context.tunes[0], prompt, step=self._step)
        return StepReport(step=self._step, is_finished=self._step >= self._steps, metrics={"reward": HUGE})

    def state(self) -> dict[str, Any]:
        return {"step": self._step}

    async def restore(self, state: dict[str, Any]) -> None:
        self._step = state["step"]

    async def close(self) -> None:
        pass


class WritingPlugin:
    @hookimpl
    def agl_algorithms(self) -> list[AlgorithmEntry]:
        return [AlgorithmEntry(name="writing", factory=Writing, tunes=("prompt_template",), needs_token_ids=False)]


def agent(task: Any, prompt: PromptTemplate, rollout: Rollout) -> float:
    """Return rewards whose sum, and whose difference to those of other steps, overflow."""
    return HUGE if "2" not in prompt.template else -HUGE


@pytest.mark.parametrize("values", [[HUGE, HUGE], [HUGE, HUGE, HUGE], [sys.float_info.max] * 7])
def test_mean_of_numbers_whose_sum_overflows_is_theirs(values: list[float]) -> None:
    assert values[0] == pytest.approx(mean(values), rel=1e-15)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_mean_of_usual_numbers_is_exact(values: list[float]) -> None:
    assert fmean(values) == mean(values)


def test_mean_of_infinities_is_no_error() -> None:
    assert math.inf == mean([math.inf, 1.0])
    assert math.isnan(mean([math.inf, -math.inf]))


@given(st.lists(FINITE, min_size=2, max_size=9))
def test_interval_of_finite_numbers_is_finite_and_holds_the_mean(values: list[float]) -> None:
    low, high = interval(values)

    assert math.isfinite(low)
    assert math.isfinite(high)
    slack = 1e-9 * max(map(abs, values))
    assert low - slack <= mean(values) <= high + slack


def test_interval_scales_with_the_numbers() -> None:
    low, high = interval([1.0, 2.0, 4.0])

    assert (low * 2.0**1000, high * 2.0**1000) == pytest.approx(interval([2.0**1000, 2.0**1001, 2.0**1002]))


@pytest.mark.parametrize("power", [300, 600, 1000])
def test_comparison_scales_with_the_rewards(power: int) -> None:
    old, new, factor = [1.0, 2.0, 1.5], [3.0, 2.5, 5.0], 2.0**power
    usual, large = (compare([scale * x for x in old], [scale * x for x in new]) for scale in (1.0, factor))
    assert _numbers(usual, factor) == pytest.approx(_numbers(large, 1.0))

    usual, large = (
        compare_tasks(*({str(n): [scale * x] * 2 for n, x in enumerate(rewards)} for rewards in (old, new)))
        for scale in (1.0, factor)
    )
    assert _numbers(usual, factor) == pytest.approx(_numbers(large, 1.0))


@given(*[st.lists(FINITE, min_size=2, max_size=5)] * 2)
def test_comparison_of_finite_rewards_is_finite(old: list[float], new: list[float]) -> None:
    tasks = [{str(n): [value, value] for n, value in enumerate(rewards)} for rewards in (old, new)]
    for found in (compare(old, new), compare_tasks(*tasks)):
        assert all(math.isfinite(value) for value in _numbers(found, 1.0) if value is not None)
        assert found.low <= found.difference <= found.high


def _numbers(found: Comparison, factor: float) -> list[float | None]:
    rewards = [factor * value for value in (found.difference, found.low, found.high)]
    return [*rewards, found.policy_improvement_ratio, found.ratio_low, found.ratio_high]


def test_validations_are_compared_where_their_differences_overflow() -> None:
    def validation(rewards: Sequence[float]) -> Validation:
        return Validation(turn=1, versions={}, rewards=tuple(rewards), tasks="t")

    good, bad = validation([HUGE, HUGE, 0.9 * HUGE]), validation([-HUGE, -HUGE, -0.9 * HUGE])

    assert is_below(bad, good, confidence=0.95)
    assert not is_below(good, bad, confidence=0.95)


@pytest.mark.parametrize("value", [HUGE, math.inf])
def test_suggestions_from_such_rewards_are_made(value: float) -> None:
    metrics = [
        Metric(
            experiment="e",
            run=1,
            algorithm="a",
            step=step,
            experiment_step=step,
            name=name,
            value=value * (-1) ** step,
            time=0.0,
        )
        for step in range(1, 40)
        for name in ("reward", "entropy", "kl")
    ]

    assert [] == [found for found in suggestions_of(metrics) if not found.evidence]


def test_run_with_rewards_near_the_largest_float_ends_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    manager = PluginManager()
    manager.register(WritingPlugin(), name="writing")

    result = Trainer(
        name="huge",
        store=SQLiteStore(f"sqlite:///{tmp_path}/huge.db"),
        algorithm=algorithm("writing", steps=2),
        initial_resources={"prompt": PromptTemplate(template="start")},
        validate_every=1,
        plugins=manager,
        progress=Quiet(),
    ).fit(agent, [{"q": 1}, {"q": 2}], val_dataset=[{"q": number} for number in range(5)])

    assert (HUGE, -HUGE) == (result.before, result.last)
    assert (HUGE, 1) == (result.best, result.kept_step)
