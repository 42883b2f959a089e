"""An update whose gradient is not finite is left out, counted and reported; several in a row end the run."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from agl.errors import AglError, ConfigError
from agl_algo_verl.local.trainer import VERL
from agl_algo_verl.ray.configuration import METRICS
from agl_algo_verl.ray.trainer import RayVERL
from agl_objectives.contract import LossTerms, TokenBatch
from agl_testing.conformance.bench import AlgorithmBench

from .world import World, config, scenario

if TYPE_CHECKING:
    from pathlib import Path

    from agl.contracts import StepReport

TRIED = 6
broken_losses = 0
"""Number of loss computations, from now on, that return a result that is not finite."""


def breaks(tokens: TokenBatch) -> LossTerms:
    """REINFORCE, but not finite while `broken_losses` is above 0; the trial call with six tokens does not count."""
    module = sys.modules[__name__]
    if len(tokens.logp_M) == TRIED:
        return LossTerms(loss_M=-tokens.advantages_M * tokens.logp_M)
    factor = math.inf if module.broken_losses > 0 else 1.0
    module.broken_losses -= 1
    return LossTerms(loss_M=-tokens.advantages_M * tokens.logp_M * factor)


def train(model_dir: Path, workdir: Path, *, broken: int, **keys: Any) -> tuple[list[StepReport], list[str]]:
    """Return the reports of two steps after a first one, and the messages; their first `broken` updates are broken."""
    settings = {"trainer.total_training_steps": 3, "rollout.n": 16, "loss": f"{__name__}:breaks", **keys}
    bench, said = AlgorithmBench(scenario(model_dir, World(), **settings), workdir), list[str]()

    async def steps() -> list[StepReport]:
        async with bench:
            algorithm = bench.scenario.make()
            await algorithm.setup(replace(bench.context(), say=said.append))
            await algorithm.step()
            sys.modules[__name__].broken_losses = broken
            reports = [await algorithm.step(), await algorithm.step()]
            await algorithm.close()
            return reports

    return asyncio.run(steps()), said


def test_an_update_that_is_not_finite_is_left_out_counted_and_told(model_dir: Path, tmp_path: Path) -> None:
    (first, second), said = train(model_dir, tmp_path, broken=1)
    assert 1.0 == first.metrics["updates_nonfinite"]
    assert all(math.isfinite(value) for value in first.metrics.values())
    assert () == first.published
    assert () != second.published
    assert "updates_nonfinite" not in second.metrics
    assert [line.startswith("1 update was skipped") for line in said if "not finite" in line] == [True]


def test_updates_beside_it_are_made(model_dir: Path, tmp_path: Path) -> None:
    (first, _), _ = train(model_dir, tmp_path, broken=1, **{"actor.ppo_epochs": 2})
    assert () != first.published
    assert first.metrics["grad_norm"] > 0


def test_too_many_in_a_row_end_the_run(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(AglError, match=r"update 8 is (nan|inf): 4 in a row are not finite, and max_nonfinite = 3"):
        train(model_dir, tmp_path, broken=4, **{"actor.ppo_epochs": 4})


def test_a_critic_that_is_not_finite_is_left_out_as_well(model_dir: Path, tmp_path: Path) -> None:
    world = World(lambda response: 1.7e308 if response[0] >= 128 else -1.7e308)
    keys = {"algorithm.adv_estimator": "gae", "trainer.total_training_steps": 1, "rollout.n": 4}
    bench = AlgorithmBench(scenario(model_dir, world, **keys), tmp_path)

    async def step() -> StepReport:
        async with bench:
            algorithm = bench.scenario.make()
            await algorithm.setup(bench.context())
            return await algorithm.step()

    report = asyncio.run(step())
    assert 1.0 == report.metrics["value_updates_nonfinite"]
    assert () == report.published


def test_a_limit_below_0_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_nonfinite = -1: Expected"):
        VERL(**config(), max_nonfinite=-1)


def test_the_cluster_counts_and_tells_steps_that_verl_skipped(tmp_path: Path) -> None:
    said: list[str] = []
    engine: Any = RayVERL(**config(**{"rollout.name": "agl_hf"}), max_nonfinite=1)
    engine._context = SimpleNamespace(workdir=tmp_path, name="verl", say=said.append)
    engine._folder.mkdir(parents=True, exist_ok=True)
    norms = [math.nan, 1.0, math.nan, math.inf]
    lines = [
        json.dumps({"step": step, "data": {"actor/grad_norm": norm, "actor/lr": 0.1}})
        for step, norm in enumerate(norms, start=1)
    ]
    (engine._folder / METRICS).write_text("\n".join(lines))
    skipped = {"lr": 0.1, "updates_nonfinite": 1.0}
    assert [skipped, {"lr": 0.1, "grad_norm": 1.0}, skipped] == [engine._trained(step) for step in (1, 2, 3)]
    assert ["1 update was skipped: gradients are not finite"] * 2 == said
    with pytest.raises(AglError, match=r"2 in a row are not finite, and max_nonfinite = 1"):
        engine._trained(4)
