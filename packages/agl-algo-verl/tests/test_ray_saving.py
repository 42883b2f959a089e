"""Steps on a real Ray cluster that are not saved yet, and going back to a saved one."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file

from agl.schemas import ResourceVersion, Weights
from agl_algo_verl.algorithm import make
from agl_algo_verl.ray.checkpoints import steps_of
from agl_algo_verl.serving.policy import VerlPolicy
from agl_testing.conformance import AlgorithmScenario
from agl_testing.conformance.bench import AlgorithmBench

from .test_ray import FORGOTTEN, served_gap
from .world import World, config

pytest.importorskip("agl_algo_torch", reason="needs agl-algo-torch, which serves the policy")

if TYPE_CHECKING:
    import torch

KEYS = {"rollout.name": "agl_hf", "trainer.total_training_steps": 8, "actor.optim.lr": 3e-3}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "actor/huggingface/model.safetensors")


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@FORGOTTEN
@pytest.mark.soak
@pytest.mark.skipif(sys.platform == "win32", reason="VERL runs on Linux and macOS")
def test_steps_on_ray_wait_to_be_saved_and_an_earlier_one_continues_with_a_smaller_rate(
    model_dir: Path, tmp_path: Path
) -> None:
    world, start = World(), Weights(uri=str(model_dir))
    scenario = AlgorithmScenario(
        make=lambda: make(engine="ray", threads=1, saving={"keep": 1, "save_every": 2}, **config(**KEYS)),
        # A version that is not saved has no files, and this world reads them, so it plays with those of the start.
        play=lambda order: world.play(replace(order, resources={"llm": start})),
        tunes=("llm",),
        policies=lambda _: {"llm": VerlPolicy(name="llm", model=str(model_dir), threads=1)},
    )
    bench, first = AlgorithmBench(scenario, tmp_path), tmp_path / "verl-000000"

    def saved() -> dict[str, list[int]]:
        return {str(path.relative_to(tmp_path)): steps_of(path) for path in sorted(tmp_path.glob("*/global_step_*"))}

    async def body() -> tuple[dict[str, Any], Any, Any]:
        async with bench:
            algorithm: Any = scenario.make()
            await algorithm.setup(replace(bench.context(), defer=lambda save: None))
            try:
                await algorithm.step()
                assert not await algorithm.save(False)
                assert {} == saved()
                assert await served_gap_of_published(bench) is None

                await algorithm.step()  # a save is due, which VERL makes at the end of its step
                assert {"verl-000000/global_step_2": []} == saved()
                assert await algorithm.save(False)
                assert {"verl-000000/global_step_2": [2]} == saved()
                state, live, gap = algorithm.state(), bench.versions(), await served_gap(bench)
                bench.kept.add(2)

                await algorithm.step()
                assert not await algorithm.save(False)
                assert await algorithm.save(True)  # as before a validation: VERL waits for rows, and saves
                assert gap < 1e-5 > await served_gap(bench)
                await algorithm.step()
                assert await algorithm.save(True)
                assert {f"verl-000000/global_step_{step}": [step] for step in (2, 3, 4)} == saved()

                await bench.go_back(live)
                await algorithm.go_back(state, rate=1e-4)
                report = await algorithm.step()
                assert await algorithm.save(True)
                return state, algorithm.state(), report
            finally:
                await algorithm.close()

    before, after, report = asyncio.run(body())

    assert (5, 5) == (report.step, after["step"])
    assert report.metrics["lr"] == pytest.approx(3e-7)
    again = tmp_path / "verl-000004" / "global_step_3"
    assert (str(first / "global_step_2"), str(again)) == (before["checkpoint"], after["checkpoint"])
    assert 0 < distance(weights(first / "global_step_2"), weights(again)) < 1e-5
    assert {"verl-000000/global_step_2": [2], "verl-000000/global_step_4": [4], "verl-000004/global_step_3": [5]} == (
        saved()
    )


async def served_gap_of_published(bench: AlgorithmBench) -> float | None:
    """Return the gap between served and published weights; None if the published weights are not on disk."""
    resource = bench.published[-1].resource
    assert isinstance(resource, Weights)
    return await served_gap(bench) if Path(resource.uri).is_dir() else None


@FORGOTTEN
@pytest.mark.soak
@pytest.mark.skipif(sys.platform == "win32", reason="VERL runs on Linux and macOS")
def test_rates_of_a_run_on_ray_that_is_interrupted_and_continued_are_those_in_one_process(
    model_dir: Path, tmp_path: Path
) -> None:
    """Another algorithm publishes after the second step; after the third, the run continues with other rates."""
    shape = {"lr": 4e-3, "lr_scheduler_type": "cosine", "lr_warmup_steps": 2}
    keys = {f"{role}.optim.{name}": value for role in ("actor", "critic") for name, value in shape.items()}
    keys |= {"algorithm.adv_estimator": "gae", "trainer.critic_warmup": 2, "trainer.total_training_steps": 6}

    def rates(engine: str) -> list[tuple[float | None, float, int]]:
        world, start = World(), Weights(uri=str(model_dir))
        own = keys | ({"rollout.name": "agl_hf"} if engine == "ray" else {})
        scenario = AlgorithmScenario(
            make=lambda: make(engine=engine, threads=1, **config(**own)),
            play=lambda order: world.play(replace(order, resources={"llm": start})),
            tunes=("llm",),
            policies=lambda _: {"llm": VerlPolicy(name="llm", model=str(model_dir), threads=1)},
        )
        bench = AlgorithmBench(scenario, tmp_path / engine)

        async def body() -> list[tuple[float | None, float, int]]:
            found, state = list[tuple[float | None, float, int]](), None
            async with bench:
                for steps in (3, 1):
                    algorithm: Any = scenario.make()
                    await algorithm.setup(bench.context())
                    if state is not None:
                        await algorithm.restore(state)
                    try:
                        for _ in range(steps):
                            report = await algorithm.step()
                            rate, critics = report.metrics.get("lr"), report.metrics["critic_lr"]
                            found.append((rate, critics, len(report.published)))
                            if report.step == 2:
                                other = ResourceVersion(name="llm", version="o", resource=start, algorithm="other")
                                bench._live["llm"] = other
                        state = algorithm.state()
                    finally:
                        await algorithm.close()
                    own.update({"actor.optim.lr": 1e-3, "critic.optim.lr": 2e-3})
            return found

        return asyncio.run(body())

    here, there = rates("inproc"), rates("ray")
    assert [0, 1, 1, 1] == [count for _, _, count in here]
    assert here[0][0] is None
    for mine, its in zip(here, there, strict=True):
        assert mine == pytest.approx(its)
