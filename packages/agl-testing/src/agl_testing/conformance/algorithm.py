"""The conformance class of algorithms: steps resume, publish only resources they tune, and train no rollout twice."""

# ruff: noqa: D102  # the names of the tests say what holds

import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from agl.contracts import Algorithm, ExtendableAlgorithm, ReversibleAlgorithm, StepReport
from agl.errors import ConfigError
from agl.schemas import Json
from agl_testing.conformance._base import Conformance, require, run
from agl_testing.conformance.bench import NAME, AlgorithmBench, AlgorithmScenario

LIMIT_S = 300.0
"""Seconds that one test may take, which includes loading models."""


class AlgorithmConformance(Conformance):
    """Run every test of the algorithm contract.

    .. code-block:: python

        class TestMyAlgorithm(AlgorithmConformance):
            @pytest.fixture
            def scenario(self):
                return AlgorithmScenario(make=lambda: MyAlgorithm(steps=3), play=..., tunes=("prompt",), ...)
    """

    contract: ClassVar[str] = "algorithm"

    is_deterministic: ClassVar[bool] = True
    """True if equal seeds and rollouts give equal reports on one machine."""

    collects: ClassVar[bool] = True
    """True if the algorithm collects rollouts; false for example for fine-tuning on files."""

    @pytest.fixture
    def scenario(self) -> AlgorithmScenario:
        """The algorithm and a small world to test it in; the only fixture to override."""
        raise NotImplementedError("override the fixture 'scenario' with the algorithm under test")

    @pytest.fixture(scope="class")
    @classmethod
    def _runs(cls) -> dict[str, tuple[AlgorithmBench, list[StepReport]]]:
        """Runs from the first step to the last, which the tests of a class share, by the scenario's parameters."""
        return {}

    _complete_runs: dict[str, tuple[AlgorithmBench, list[StepReport]]] | None = None

    @pytest.fixture(autouse=True)
    def _share_complete_runs(
        self, _runs: dict[str, tuple[AlgorithmBench, list[StepReport]]], request: pytest.FixtureRequest
    ) -> None:
        self._complete_runs = _runs
        self._parameters = getattr(getattr(request.node, "callspec", None), "id", "")

    def _complete(self, scenario: AlgorithmScenario, workdir: Path) -> tuple[AlgorithmBench, list[StepReport]]:
        if self._complete_runs is not None and self._parameters in self._complete_runs:
            return self._complete_runs[self._parameters]
        bench = AlgorithmBench(scenario, workdir)
        complete = bench, run(_run(bench), limit_s=LIMIT_S)
        if self._complete_runs is not None:
            self._complete_runs[self._parameters] = complete
        return complete

    def test_steps_are_counted_until_the_algorithm_says_that_it_is_finished(
        self, scenario: AlgorithmScenario, tmp_path: Path
    ) -> None:
        _, reports = self._complete(scenario, tmp_path)
        assert list(range(1, len(reports) + 1)) == [report.step for report in reports]
        assert [False] * (len(reports) - 1) + [True] == [report.is_finished for report in reports]
        assert reports[-1].stop_reason

    def test_no_rollout_is_trained_twice_and_only_collected_ones_are(
        self, scenario: AlgorithmScenario, tmp_path: Path
    ) -> None:
        bench, reports = self._complete(scenario, tmp_path)
        trained = [rollout_id for report in reports for rollout_id in report.trained]
        assert sorted(set(trained)) == sorted(trained)
        assert set(trained) <= set(bench.collected)
        modes = {bench.collected[rollout_id].rollout.mode for rollout_id in trained}
        assert modes <= {"train"}
        assert bool(bench.collected) == self.collects

    def test_reports_name_what_was_published(self, scenario: AlgorithmScenario, tmp_path: Path) -> None:
        bench, reports = self._complete(scenario, tmp_path)
        named = [name for report in reports for name in report.published]
        assert [f"{v.name}@{v.version}" for v in bench.published] == named
        assert bench.published
        assert {v.name for v in bench.published} <= set(scenario.tunes)
        assert all(f"{NAME}-{v.step}" == v.version for v in bench.published)

    def test_metrics_are_finite_numbers(self, scenario: AlgorithmScenario, tmp_path: Path) -> None:
        for report in self._complete(scenario, tmp_path)[1]:
            assert {} == {name: value for name, value in report.metrics.items() if not math.isfinite(value)}

    def test_state_is_json_after_every_step(self, scenario: AlgorithmScenario, tmp_path: Path) -> None:
        async def body() -> None:
            async with AlgorithmBench(scenario, tmp_path) as bench, _opened(bench) as algorithm:
                for _ in range(2):
                    report = await algorithm.step()
                    assert _as_saved(algorithm.state()) == dict(algorithm.state())
                    if report.is_finished:
                        break

        run(body(), limit_s=LIMIT_S)

    def test_resumed_run_does_what_an_uninterrupted_one_does(self, scenario: AlgorithmScenario, tmp_path: Path) -> None:
        _, whole = self._complete(scenario, tmp_path / "whole")
        resumed = run(_run(AlgorithmBench(scenario, tmp_path / "parts"), is_resumed=True), limit_s=LIMIT_S)
        assert [(r.step, r.is_finished) for r in whole] == [(r.step, r.is_finished) for r in resumed]
        if self.is_deterministic:
            assert [(r.trained, r.published) for r in whole] == [(r.trained, r.published) for r in resumed]
            assert [_stable(r) for r in whole] == [_stable(r) for r in resumed]

    def test_finished_run_that_is_given_more_steps_does_what_a_longer_one_does(
        self, scenario: AlgorithmScenario, tmp_path: Path
    ) -> None:
        if scenario.make_longer is None:
            pytest.skip("the scenario has no make_longer")
        longer = replace(scenario, make=scenario.make_longer)

        async def body() -> None:
            whole = await _run(AlgorithmBench(longer, tmp_path / "whole"))
            bench = AlgorithmBench(scenario, tmp_path / "parts")
            reports, state = await _finish(bench)
            assert not _has_more(scenario, state)
            assert _has_more(longer, state)
            bench.scenario = longer
            further, state = await _finish(bench, state=state)
            assert further
            assert not _has_more(longer, state)
            parts = [*reports, *further]
            assert [report.step for report in whole] == [report.step for report in parts]
            if self.is_deterministic:
                assert [(r.trained, _stable(r)) for r in whole] == [(r.trained, _stable(r)) for r in parts]

        run(body(), limit_s=LIMIT_S)

    def test_step_that_was_lost_is_repeated_from_the_state_before_it(
        self, scenario: AlgorithmScenario, tmp_path: Path
    ) -> None:
        require(self.is_deterministic, "is_deterministic", "algorithm")

        async def body() -> None:
            bench = AlgorithmBench(scenario, tmp_path)
            async with bench, _opened(bench) as first:
                report = await first.step()
                if report.is_finished:
                    pytest.skip("the scenario ends after one step; give it more")
                saved = _as_saved(first.state())
                lost = await first.step()
            played = len(bench.collected)
            async with bench, _opened(bench, state=saved) as second:
                repeated = await second.step()
            assert (lost.step, lost.trained, lost.published) == (repeated.step, repeated.trained, repeated.published)
            assert _stable(lost) == _stable(repeated)
            assert played == len(bench.collected)

        run(body(), limit_s=LIMIT_S)

    def test_algorithm_that_goes_back_counts_its_steps_on_and_resumes_alike(
        self, scenario: AlgorithmScenario, tmp_path: Path
    ) -> None:
        if not isinstance(scenario.make(), ReversibleAlgorithm):
            pytest.skip("the algorithm cannot go back to an earlier state")
        undisturbed = run(_third_after_going_back(scenario, tmp_path / "whole"), limit_s=LIMIT_S)
        resumed = run(_third_after_going_back(scenario, tmp_path / "parts", is_resumed=True), limit_s=LIMIT_S)
        assert (3, 3) == (undisturbed.step, resumed.step)
        if self.is_deterministic:
            assert undisturbed.trained == resumed.trained
            assert _stable(undisturbed) == _stable(resumed)

    def test_setup_refuses_to_tune_nothing_before_anything_is_paid(
        self, scenario: AlgorithmScenario, tmp_path: Path
    ) -> None:
        async def body() -> None:
            async with AlgorithmBench(scenario, tmp_path) as bench:
                algorithm = scenario.make()
                with pytest.raises(ConfigError):
                    await algorithm.setup(bench.context(tunes=()))
                await algorithm.close()
                assert (0, []) == (bench.requests, bench.published)

        run(body(), limit_s=LIMIT_S)

    def test_setup_pays_for_nothing(self, scenario: AlgorithmScenario, tmp_path: Path) -> None:
        async def body() -> None:
            async with AlgorithmBench(scenario, tmp_path) as bench, _opened(bench):
                assert (0, []) == (bench.requests, bench.published)

        run(body(), limit_s=LIMIT_S)

    def test_close_may_be_repeated(self, scenario: AlgorithmScenario, tmp_path: Path) -> None:
        async def body() -> None:
            async with AlgorithmBench(scenario, tmp_path) as bench, _opened(bench) as algorithm:
                await algorithm.close()

        run(body(), limit_s=LIMIT_S)


@asynccontextmanager
async def _opened(bench: AlgorithmBench, *, state: Mapping[str, Json] | None = None) -> AsyncGenerator[Algorithm]:
    """Yield a new algorithm, set up and restored as in a run, and close it at the end."""
    algorithm = bench.scenario.make()
    await algorithm.setup(bench.context())
    if state is not None:
        await algorithm.restore(state)
    try:
        yield algorithm
    finally:
        await algorithm.close()


async def _run(bench: AlgorithmBench, *, is_resumed: bool = False) -> list[StepReport]:
    """Return the reports of all steps; with ``is_resumed``, each step runs on a new object, restored from the state."""
    reports: list[StepReport] = []
    saved: Mapping[str, Json] | None = None
    while not (reports and reports[-1].is_finished):
        async with bench, _opened(bench, state=saved) as algorithm:
            while not (reports and reports[-1].is_finished):
                reports.append(await algorithm.step())
                assert len(reports) <= bench.scenario.max_steps, "the algorithm does not finish"
                saved = _as_saved(algorithm.state())
                if is_resumed:
                    break
    return reports


async def _third_after_going_back(
    scenario: AlgorithmScenario, workdir: Path, *, is_resumed: bool = False
) -> StepReport:
    """Take two steps, go back to the state after the first, and return the report of the next step.

    With ``is_resumed``, that step runs on a new object, restored from the state.
    """
    bench = AlgorithmBench(scenario, workdir)
    async with bench, _opened(bench) as algorithm:
        assert isinstance(algorithm, ReversibleAlgorithm)
        first = await algorithm.step()
        earlier, live = _as_saved(algorithm.state()), bench.versions()
        bench.kept.add(first.step)
        if first.is_finished or (await algorithm.step()).is_finished:
            pytest.skip("the scenario ends after two steps; give it more")
        await bench.go_back(live)
        await algorithm.go_back(earlier, rate=0.5)
        saved = _as_saved(algorithm.state())
        if not is_resumed:
            return await algorithm.step()
    async with bench, _opened(bench, state=saved) as again:
        return await again.step()


async def _finish(
    bench: AlgorithmBench, *, state: Mapping[str, Json] | None = None
) -> tuple[list[StepReport], Mapping[str, Json]]:
    """Run one algorithm object from ``state`` to the end; return the reports of its steps, and its last state."""
    reports: list[StepReport] = []
    async with bench, _opened(bench, state=state) as algorithm:
        while not (reports and reports[-1].is_finished):
            reports.append(await algorithm.step())
            assert len(reports) <= bench.scenario.max_steps, "the algorithm does not finish"
        return reports, _as_saved(algorithm.state())


def _has_more(scenario: AlgorithmScenario, state: Mapping[str, Json]) -> bool:
    algorithm = scenario.make()
    assert isinstance(algorithm, ExtendableAlgorithm)
    return algorithm.has_more(state, tasks=len(scenario.train), sources_go_on=False)


def _as_saved(state: Mapping[str, Json]) -> Mapping[str, Json]:
    return msgspec.json.decode(msgspec.json.encode(dict(state)))


def _stable(report: StepReport) -> Mapping[str, float]:
    """Return the metrics that do not measure time, rounded so that the order of summation does not matter."""
    return {name: round(value, 5) for name, value in report.metrics.items() if not _measures_time(name)}


def _measures_time(name: str) -> bool:
    return name.endswith(("_s", "_seconds")) or "time" in name
