"""VERL in one process continues after its last step when it gets more steps."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import torch

from agl.schemas import ResourceVersion, Weights
from agl_testing.conformance.bench import AlgorithmBench

from .world import scenario, whole_model

if TYPE_CHECKING:
    from pathlib import Path


def sit(bench: AlgorithmBench, state: Any = None) -> Any:
    """Take all steps after `state`; returns the state at the end."""

    async def body() -> Any:
        async with bench:
            algorithm = bench.scenario.make()
            await algorithm.setup(bench.context())
            if state is not None:
                await algorithm.restore(state)
            while not (await algorithm.step()).is_finished:
                pass
            await algorithm.close()
            return algorithm.state()

    return asyncio.run(body())


def weights(bench: AlgorithmBench, number: int) -> dict[str, torch.Tensor]:
    """Return the weights of a published version, by tensor name."""
    resource = bench.published[number].resource
    assert isinstance(resource, Weights)
    return dict(whole_model(resource).state_dict())


def is_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("keys", [{}, {"algorithm.adv_estimator": "gae"}], ids=["grpo", "gae"])
def test_two_sittings_give_the_weights_of_one(keys: dict[str, Any], model_dir: Path, tmp_path: Path) -> None:
    short, longer = (scenario(model_dir, **keys, **{"trainer.total_training_steps": steps}) for steps in (1, 2))
    whole, parts = AlgorithmBench(longer, tmp_path / "whole"), AlgorithmBench(short, tmp_path / "parts")
    sit(whole)
    state = sit(parts)
    assert not short.make().has_more(state, tasks=8, sources_go_on=True)
    assert longer.make().has_more(state, tasks=8, sources_go_on=False)
    parts.scenario = longer
    sit(parts, state)
    assert not is_equal(weights(parts, 0), weights(parts, 1))
    assert is_equal(weights(whole, 1), weights(parts, 1))


def test_a_rate_that_had_fallen_to_nothing_is_that_of_the_new_length(model_dir: Path, tmp_path: Path) -> None:
    keys = {"actor.optim.lr_scheduler_type": "cosine"}
    short, longer = (scenario(model_dir, **keys, **{"trainer.total_training_steps": steps}) for steps in (1, 2))
    bench = AlgorithmBench(short, tmp_path)
    state = sit(bench)
    bench.scenario = longer
    sit(bench, state)
    assert not is_equal(weights(bench, 0), weights(bench, 1))


OPTIMS = {"grpo": ("actor.optim",), "gae": ("actor.optim", "critic.optim")}


@pytest.mark.parametrize("estimator", OPTIMS)
def test_other_settings_of_the_optimizer_hold_from_the_next_step_on(
    estimator: str, model_dir: Path, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {"algorithm.adv_estimator": estimator, "trainer.total_training_steps": 4}
    changes = {"lr": 7e-5, "betas": [0.5, 0.6], "weight_decay": 0.25}
    other = {f"{optim}.{name}": value for optim in OPTIMS[estimator] for name, value in changes.items()}
    bench = AlgorithmBench(scenario(model_dir, **keys), tmp_path)

    async def body() -> Any:
        async with bench:
            algorithm = bench.scenario.make()
            await algorithm.setup(bench.context())
            await algorithm.step()
            state = algorithm.state()
            await algorithm.close()
            algorithm = scenario(model_dir, **keys, **other).make()
            await algorithm.setup(bench.context())
            await algorithm.restore(state)
            report = await algorithm.step()
            learner = algorithm._learner
            models = [learner._worker, *([learner._critic] if estimator == "gae" else [])]
            groups = [dict(group) for model in models for group in model._worker.engine.optimizer.param_groups]
            await algorithm.close()
            return report, groups

    report, groups = asyncio.run(body())
    assert [(7e-5, (0.5, 0.6), 0.25)] * len(groups) == [
        (pytest.approx(group["lr"]), tuple(group["betas"]), group["weight_decay"]) for group in groups
    ]
    rates = ("lr", "critic_lr") if estimator == "gae" else ("lr",)
    assert [pytest.approx(7e-5)] * len(rates) == [report.metrics[name] for name in rates]


def test_a_schedule_goes_on_where_it_is_when_another_algorithm_has_published(model_dir: Path, tmp_path: Path) -> None:
    keys = {"actor.optim.lr_warmup_steps": 3, "actor.optim.lr_scheduler_type": "cosine"}
    made = scenario(model_dir, **keys, **{"trainer.total_training_steps": 6})

    def rates(folder: Path, *, foreign: int) -> list[float]:
        bench = AlgorithmBench(made, folder)

        async def body() -> list[float]:
            async with bench:
                algorithm, found = made.make(), list[float]()
                await algorithm.setup(bench.context())
                for step in range(1, 7):
                    found.append((await algorithm.step()).metrics["lr"])
                    if step == foreign:
                        start = Weights(uri=str(model_dir))
                        bench._live["llm"] = ResourceVersion(name="llm", version="a", resource=start, algorithm="other")
                await algorithm.close()
                return found

        return asyncio.run(body())

    alone = rates(tmp_path / "alone", foreign=0)
    assert alone[0] < alone[2] > alone[5]
    assert alone == pytest.approx(rates(tmp_path / "beside", foreign=4))
