"""The conformance class of algorithms passes a correct algorithm, and detects faulty ones."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agl.contracts import AlgorithmContext, StepReport
from agl.errors import ConfigError, NotFoundError
from agl.schemas import Episode, Json, PromptTemplate
from agl_testing.conformance import AlgorithmConformance, AlgorithmScenario, RolloutOrder
from agl_testing.conformance.bench import AlgorithmBench

TASKS: list[Json] = [{"question": "q"}]
CANDIDATES = ("be brief", "be wrong", "be right")


class PickPrompt:
    """A minimal algorithm, which tries one prompt per step and keeps the best."""

    def __init__(self) -> None:
        self.step_number = 0
        self.best = ("", -1.0)
        self.tuned = ""

    async def setup(self, context: AlgorithmContext) -> None:
        if not context.tunes:
            raise ConfigError("nothing to tune")
        self.context, self.tuned = context, context.tunes[0]

    async def step(self) -> StepReport:
        self.step_number += 1
        template = CANDIDATES[self.step_number - 1]
        version = await self.context.publish(self.tuned, PromptTemplate(template=template), step=self.step_number)
        collected = await self.context.collect(self.context.train[:2], step=self.step_number, n=2)
        score = sum(episode.reward or 0.0 for episode in collected.episodes) / len(collected.episodes)
        self.best = max(self.best, (template, score), key=lambda pair: pair[1])
        is_last = self.step_number == len(CANDIDATES)
        return StepReport(
            step=self.step_number,
            is_finished=is_last,
            metrics={"reward": score},
            trained=tuple(episode.rollout.rollout_id for episode in collected.episodes),
            published=(f"{version.name}@{version.version}",),
            stop_reason="no prompt is left" if is_last else "",
        )

    def state(self) -> Mapping[str, Json]:
        return {"step": self.step_number, "best": list(self.best)}

    async def restore(self, state: Mapping[str, Json]) -> None:
        self.step_number, self.best = state["step"], tuple(state["best"])

    async def close(self) -> None: ...


def play(order: RolloutOrder) -> Episode:
    prompt = order.resources["prompt"]
    assert isinstance(prompt, PromptTemplate)
    reward = float(prompt.template == "be right") + order.seed % 7 / 100
    return Episode(rollout=order.rollout, attempt=None, reward=reward)


def scenario_of(make: Callable[[], Any]) -> AlgorithmScenario:
    return AlgorithmScenario(
        make=make, play=play, tunes=("prompt",), resources={"prompt": PromptTemplate(template="be")}
    )


class TestPickPrompt(AlgorithmConformance):
    @pytest.fixture
    def scenario(self) -> AlgorithmScenario:
        return scenario_of(PickPrompt)


class Forgetful(PickPrompt):
    async def restore(self, state: Mapping[str, Json]) -> None:
        """Restart from the beginning, which is the fault of this algorithm."""


class TrainsTwice(PickPrompt):
    async def step(self) -> StepReport:
        report = await super().step()
        return msgspec.structs.replace(report, trained=report.trained[:1] * 2)


class HoldsObjects(PickPrompt):
    def state(self) -> Mapping[str, Json]:
        return {**super().state(), "best": self.best}


class Endless(PickPrompt):
    async def step(self) -> StepReport:
        self.step_number = 0
        return msgspec.structs.replace(await super().step(), is_finished=False)


class HidesPublications(PickPrompt):
    async def step(self) -> StepReport:
        return msgspec.structs.replace(await super().step(), published=())


class Eager(PickPrompt):
    async def setup(self, context: AlgorithmContext) -> None:
        await super().setup(context)
        await context.collect(context.train, step=0)


class ReportsNoNumber(PickPrompt):
    async def step(self) -> StepReport:
        return msgspec.structs.replace(await super().step(), metrics={"loss": float("nan")})


class TunesNothing(PickPrompt):
    async def setup(self, context: AlgorithmContext) -> None:
        if context.tunes:
            await super().setup(context)


class StopsSilently(PickPrompt):
    async def step(self) -> StepReport:
        return msgspec.structs.replace(await super().step(), stop_reason="")


class TrainsOnValidation(PickPrompt):
    async def step(self) -> StepReport:
        report = await super().step()
        seen = await self.context.collect(self.context.val, step=self.step_number, mode="val")
        return msgspec.structs.replace(report, trained=tuple(e.rollout.rollout_id for e in seen.episodes))


class ForgetsItsPlace(PickPrompt):
    """Goes through its tasks by a counter that is missing from its state."""

    position = 0

    async def step(self) -> StepReport:
        self.position += 1
        context = self.context
        self.context = dataclasses.replace(context, train=context.train[self.position :])
        try:
            return await super().step()
        finally:
            self.context = context


class ClosesOnce(PickPrompt):
    is_closed = False

    async def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (Forgetful, "test_resumed_run_does_what_an_uninterrupted_one_does"),
        (Forgetful, "test_step_that_was_lost_is_repeated_from_the_state_before_it"),
        (TrainsTwice, "test_no_rollout_is_trained_twice_and_only_collected_ones_are"),
        (HoldsObjects, "test_state_is_json_after_every_step"),
        (Endless, "test_steps_are_counted_until_the_algorithm_says_that_it_is_finished"),
        (HidesPublications, "test_reports_name_what_was_published"),
        (StopsSilently, "test_steps_are_counted_until_the_algorithm_says_that_it_is_finished"),
        (TrainsOnValidation, "test_no_rollout_is_trained_twice_and_only_collected_ones_are"),
        (ReportsNoNumber, "test_metrics_are_finite_numbers"),
        (ClosesOnce, "test_close_may_be_repeated"),
        (Eager, "test_setup_pays_for_nothing"),
    ],
)
def test_unsound_algorithm_fails_the_test_that_protects_from_it(broken: Any, test: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        getattr(AlgorithmConformance(), test)(scenario_of(broken), tmp_path)


def test_algorithm_that_asks_for_other_tasks_after_a_lost_step_fails(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="under-test-2-train-0-0 was asked for again with another task"):
        AlgorithmConformance().test_step_that_was_lost_is_repeated_from_the_state_before_it(
            scenario_of(ForgetsItsPlace), tmp_path
        )


async def test_bench_gives_the_versions_that_are_pinned(tmp_path: Path) -> None:
    async with AlgorithmBench(scenario_of(PickPrompt), tmp_path) as bench:
        await bench.publish("prompt", PromptTemplate(template="be right"), step=1)
        await bench.propose("prompt", PromptTemplate(template="be brief"), step=1, key="c")
        for step, (version, reward) in enumerate(
            (("v0", 0), ("under-test-1", 1), ("under-test-1-c", 0), (None, 1)), start=2
        ):
            pinned = {"prompt": version} if version else None
            (episode,) = (await bench.collect(TASKS, step=step, resources=pinned)).episodes
            assert {"prompt": version or "under-test-1"} == episode.rollout.resources
            assert reward == int(episode.reward or 0.0)
        with pytest.raises(NotFoundError, match="prompt@v9"):
            await bench.collect(TASKS, step=9, resources={"prompt": "v9"})
        with pytest.raises(ConfigError, match="with other versions"):
            await bench.collect(TASKS, step=2, resources={"prompt": "under-test-1"})


def test_algorithm_that_accepts_nothing_to_tune_fails(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        AlgorithmConformance().test_setup_refuses_to_tune_nothing_before_anything_is_paid(
            scenario_of(TunesNothing), tmp_path
        )
