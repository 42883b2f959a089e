"""Going back to an earlier state in one process restores weights, moments and critic, and lowers the rate."""

from __future__ import annotations

import asyncio
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file

from agl.errors import ConfigError
from agl.schemas import Weights
from agl_algo_verl.local.critic import VerlCritic
from agl_algo_verl.local.worker import VerlWorker
from agl_algo_verl.losses.loss_worker import ClusterCritic, ClusterWorker
from agl_algo_verl.ray.schedule import schedule_after
from agl_algo_verl.rows.training import own_checkpoint
from agl_algo_verl.settings.settings import read_settings
from agl_objectives.directories import prune
from agl_testing.conformance.bench import AlgorithmBench

from .world import config, scenario

if TYPE_CHECKING:
    import torch

KEYS: dict[str, Any] = {"trainer.total_training_steps": 8, "actor.optim.lr": 3e-3}


def served(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "weights" / f"{step:06d}" / "model.safetensors")


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize(
    ("keys", "is_resumed"),
    [({}, True), ({"algorithm.adv_estimator": "gae"}, True), ({"actor.use_kl_loss": True}, False)],
    ids=["grpo", "gae", "kl"],
)
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


@pytest.mark.parametrize("is_resumed", [False, True])
def test_groups_that_were_collected_ahead_with_lost_weights_are_not_trained(
    model_dir: Path, tmp_path: Path, is_resumed: bool
) -> None:
    bench = AlgorithmBench(scenario(model_dir, **KEYS, **{"trainer.v1.trainer_mode": "colocate_async"}), tmp_path)

    async def body() -> Any:
        async with bench:
            algorithm = bench.scenario.make()
            await algorithm.setup(bench.context())
            await algorithm.step()
            state, live = algorithm.state(), bench.versions()
            bench.kept.add(1)
            await algorithm.step()
            await bench.go_back(live)
            await algorithm.go_back(state, rate=0.5)
            saved = algorithm.state()
            if is_resumed:
                await algorithm.close()
                algorithm = bench.scenario.make()
                await algorithm.setup(bench.context())
                await algorithm.restore(saved)
            reports = [await algorithm.step(), await algorithm.step()]
            await algorithm.close()
            return [(each.metrics["groups_stale"], each.metrics["staleness"]) for each in reports]

    assert [(2.0, 0.0), (0.0, 1.0)] == asyncio.run(body())


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


@pytest.mark.parametrize("kind", ["outside", "changed"])
def test_checkpoint_outside_of_the_run_or_with_a_changed_file_is_not_unpickled(
    kind: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = AlgorithmBench(scenario(model_dir, **KEYS), tmp_path / "run")

    async def body() -> None:
        async with bench:
            algorithm = bench.scenario.make()
            await algorithm.setup(bench.context())
            await algorithm.step()
            state = dict(algorithm.state())
            checkpoint = Path(str(state["checkpoint"]))
            if kind == "outside":
                state["checkpoint"] = str(shutil.copytree(checkpoint, tmp_path / "elsewhere"))
            else:
                next(checkpoint.glob("*.pt")).write_bytes(b"forged")
            other = bench.scenario.make()
            await other.setup(bench.context())
            monkeypatch.setattr("torch.load", lambda *_, **__: pytest.fail("unpickled"))
            await other.restore(state)

    says = {
        "outside": "outside of the run's folder",
        "changed": r"no whole training checkpoint .*\.pt is missing or was",
    }
    with pytest.raises(ConfigError, match=says[kind]):
        asyncio.run(body())


def test_checkpoint_of_a_run_whose_state_folder_is_a_link_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "big" / "state" / "000001").mkdir(parents=True)
    (tmp_path / "run" / "state").symlink_to(tmp_path / "big" / "state")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for folder in ("run", "link"):
        checkpoint = str(tmp_path / folder / "state" / "000001")
        assert checkpoint == own_checkpoint({"checkpoint": checkpoint}, workdir=tmp_path / "run")
    for other in ("run/../other", "run/state/../../other", "big/state/000001", "run2/state"):
        with pytest.raises(ConfigError, match="outside of the run's folder"):
            own_checkpoint({"checkpoint": str(tmp_path / other)}, workdir=tmp_path / "run")


def opened_on_a_cluster(model_dir: Path, **keys: Any) -> Any:
    """Return the engines of a policy and its critic, opened like those of a cluster for a run of four steps."""
    settings = read_settings(config(**{"algorithm.adv_estimator": "gae", **keys}))[0]
    policy = VerlWorker(origin=Weights(uri=str(model_dir)), settings=settings, steps=2)
    return policy._worker, VerlCritic(str(model_dir), settings=settings, steps=2, device=policy.device)._worker


@pytest.fixture
def _workers_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"language_model": ClusterWorker, "value_model": ClusterCritic}
    monkeypatch.setattr("agl_algo_verl.losses.loss_worker.LossWorker", lambda given: kinds[given.model_type](given))


@pytest.mark.usefixtures("_workers_of_a_cluster")
def test_workers_of_a_cluster_load_a_checkpoint_with_the_configured_settings(model_dir: Path, tmp_path: Path) -> None:
    def configured(**changes: Any) -> dict[str, Any]:
        return {f"{role}.optim.{name}": value for role in ("actor", "critic") for name, value in changes.items()}

    for worker in opened_on_a_cluster(model_dir, **configured(lr=4e-3)):
        worker.save_checkpoint(str(tmp_path / worker.config.model_type), global_step=1)
    for worker in opened_on_a_cluster(model_dir, **configured(lr=1e-3, betas=[0.5, 0.6], weight_decay=0.3)):
        worker.load_checkpoint(str(tmp_path / worker.config.model_type))
        groups = worker.engine.optimizer.param_groups
        found = [(group["lr"], tuple(group["betas"]), group["weight_decay"]) for group in groups]
        assert ([(1e-3, (0.5, 0.6), 0.3)], [1e-3]) == (found, worker.engine.lr_scheduler.base_lrs)


@pytest.mark.usefixtures("_workers_of_a_cluster")
def test_schedules_of_a_cluster_are_those_of_the_run(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"lr": 8e-3, "lr_scheduler_type": "cosine"}
    keys = {f"{role}.optim.{name}": value for role in ("actor", "critic") for name, value in shape.items()}
    settings = read_settings(config(**keys, **{"algorithm.adv_estimator": "gae", "trainer.critic_warmup": 2}))[0]
    rates = {place: 4e-3 * (1 + math.cos(math.pi * place / 4)) for place in range(4)}

    def start(done: int) -> list[Any]:
        for name, value in schedule_after(done, settings=settings, steps=4).variables().items():
            monkeypatch.setenv(name, value)
        return [*opened_on_a_cluster(model_dir, **keys)]

    def rates_of(workers: list[Any]) -> list[float]:
        return [worker.engine.optimizer.param_groups[0]["lr"] for worker in workers]

    began, later = start(0), start(3)
    assert [pytest.approx(rates[0])] * 2 == rates_of(began)
    # The policy waits for the critic in the first step, which its own schedule does not count.
    assert [pytest.approx(rates[place]) for place in (2, 3)] == rates_of(later)
    for old, new in zip(began, later, strict=True):
        old.save_checkpoint(str(tmp_path / old.config.model_type), global_step=1)
        new.load_checkpoint(str(tmp_path / old.config.model_type))
    assert [pytest.approx(rates[place]) for place in (2, 3)] == rates_of(later)


def test_pruning_leaves_the_kept_steps(tmp_path: Path) -> None:
    for step in range(1, 6):
        (tmp_path / f"{step:06d}").mkdir()

    prune(tmp_path, step=5, keep=2, kept={2, 9})

    assert ["000002", "000004", "000005"] == sorted(path.name for path in tmp_path.iterdir())
