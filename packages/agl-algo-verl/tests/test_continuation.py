"""VERL in one process goes on after its last step when it is given more."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import torch

from agl.schemas import Weights
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
    """Those of a published version."""
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
