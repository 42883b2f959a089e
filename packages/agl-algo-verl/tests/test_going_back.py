"""Going back to an earlier state in one process: weights, moments and critic of then, and a smaller rate."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file

from agl.schemas import Weights
from agl_algo_verl.files import prune
from agl_algo_verl.loss_worker import ClusterWorker
from agl_algo_verl.settings import read_settings
from agl_algo_verl.worker import VerlWorker
from agl_testing.conformance.bench import AlgorithmBench

from .world import config, scenario

if TYPE_CHECKING:
    from pathlib import Path

    import torch

KEYS: dict[str, Any] = {"trainer.total_training_steps": 8, "actor.optim.lr": 3e-3}
ESTIMATORS = pytest.mark.parametrize(
    "keys", [{}, {"algorithm.adv_estimator": "gae"}, {"actor.use_kl_loss": True}], ids=["grpo", "gae", "kl"]
)


def served(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "weights" / f"{step:06d}" / "model.safetensors")


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@ESTIMATORS
@pytest.mark.parametrize("is_resumed", [False, True])
def test_earlier_weights_continue_with_a_smaller_rate(
    model_dir: Path, tmp_path: Path, keys: dict[str, Any], is_resumed: bool
) -> None:
    bench = AlgorithmBench(scenario(model_dir, **KEYS, **keys), tmp_path)

    async def body() -> Any:
        async with bench:
            algorithm = bench.scenario.make()
            await algorithm.setup(bench.context())
            await algorithm.step()
            state, live = algorithm.state(), bench.versions()
            bench.kept.add(1)
            for _ in range(3):
                await algorithm.step()
            await bench.go_back(live)
            await algorithm.go_back(state, rate=1e-4)
            saved = algorithm.state()
            if is_resumed:
                await algorithm.close()
                algorithm = bench.scenario.make()
                await algorithm.setup(bench.context())
                await algorithm.restore(saved)
            return saved, await algorithm.step(), await algorithm.step()

    saved, report, _ = asyncio.run(body())

    assert (4, 5) == (saved["step"], report.step)
    assert str(tmp_path.absolute() / "state" / "000001") == saved["checkpoint"]
    assert report.metrics["lr"] == pytest.approx(3e-7)
    assert distance(served(tmp_path, 1), served(tmp_path, 6)) < 1e-5
    assert distance(served(tmp_path, 1), served(tmp_path, 5)) < distance(served(tmp_path, 1), served(tmp_path, 6))


def test_missing_state_is_said_and_training_goes_on_from_the_live_weights(model_dir: Path, tmp_path: Path) -> None:
    bench = AlgorithmBench(scenario(model_dir, **KEYS), tmp_path)
    said: list[str] = []

    async def body() -> Any:
        async with bench:
            algorithm = bench.scenario.make()
            await algorithm.setup(replace(bench.context(), say=said.append))
            await algorithm.step()
            state, live = algorithm.state(), bench.versions()
            bench.kept.add(1)
            await algorithm.step()
            shutil.rmtree(str(state["checkpoint"]))
            await bench.go_back(live)
            await algorithm.go_back(state, rate=1e-4)
            return await algorithm.step()

    assert 3 == asyncio.run(body()).step
    assert said[-1].endswith("is gone; training goes on with new moments of AdamW")
    assert distance(served(tmp_path, 1), served(tmp_path, 3)) < 1e-5


def test_worker_of_a_cluster_loads_a_checkpoint_with_the_configured_rate(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agl_algo_verl.loss_worker.LossWorker", ClusterWorker)

    def opened(rate: float) -> Any:
        settings = read_settings(config(**{"actor.optim.lr": rate, "trainer.total_training_steps": 4}))[0]
        return VerlWorker(origin=Weights(uri=str(model_dir)), settings=settings, steps=4, threads=1)._worker

    opened(4e-3).save_checkpoint(str(tmp_path / "saved"), global_step=1)
    worker = opened(1e-3)
    worker.load_checkpoint(str(tmp_path / "saved"))
    assert [1e-3] == [group["lr"] for group in worker.engine.optimizer.param_groups]
    assert [1e-3] == worker.engine.lr_scheduler.base_lrs


def test_pruning_leaves_the_kept_steps(tmp_path: Path) -> None:
    for step in range(1, 6):
        (tmp_path / f"{step:06d}").mkdir()

    prune(tmp_path, step=5, keep=2, kept={2, 9})

    assert ["000002", "000004", "000005"] == sorted(path.name for path in tmp_path.iterdir())
