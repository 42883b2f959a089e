"""Going back to an earlier state restores its weights and moments, lowers the rate, and finds its files."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from agl.errors import ConfigError
from agl.schemas import Weights
from agl_algo_torch.grpo import GRPO
from agl_algo_torch.learner.typed_torch import read_tensors
from agl_algo_torch.ppo import PPO
from agl_algo_torch.preferences import DPO
from agl_algo_torch.rft import RFT
from agl_objectives.directories import prune
from agl_testing.conformance import AlgorithmScenario
from agl_testing.conformance.bench import AlgorithmBench

from .token_world import World, made

if TYPE_CHECKING:
    from pathlib import Path

    import torch

COMMON = {"lr": 3e-3, "threads": 1, "device": "cpu"}
GROUPS = {"steps": 4, "tasks_per_step": 2, "group_size": 4}
ALGORITHMS = {
    "grpo": lambda: made(GRPO, **COMMON, **GROUPS, keep=1, kl_coef=0.01),
    "ppo": lambda: made(PPO, **COMMON, **GROUPS, keep=1),
    "dpo": lambda: made(DPO, **COMMON, **GROUPS, keep=1),
    "rft": lambda: made(RFT, **COMMON, **GROUPS, keep=1, min_reward=0.0),
}


def bench_of(make: Any, model_dir: Path, folder: Path) -> AlgorithmBench:
    scenario = AlgorithmScenario(
        make=make, play=World().play, tunes=("llm",), resources={"llm": Weights(uri=str(model_dir))}
    )
    return AlgorithmBench(scenario, folder)


def changes_of(folder: Path, step: int, name: str) -> dict[str, torch.Tensor]:
    return read_tensors(folder / "state" / f"{step:06d}" / f"{name}.safetensors")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_earlier_weights_and_moments_continue_with_a_smaller_rate(name: str, model_dir: Path, tmp_path: Path) -> None:
    bench = bench_of(ALGORITHMS[name], model_dir, tmp_path)

    async def work() -> Any:
        async with bench:
            algorithm = bench.scenario.make()
            await algorithm.setup(bench.context())
            await algorithm.step()
            state, live = algorithm.state(), bench.versions()
            bench.kept.add(1)
            for _ in range(2):
                await algorithm.step()
            await bench.go_back(live)
            await algorithm.go_back(state, rate=1e-4)
            saved = algorithm.state()
            report = await algorithm.step()
            return saved, report

    saved, report = asyncio.run(work())

    assert (3, 4) == (saved["step"], report.step)
    assert str(tmp_path.absolute() / "state" / "000001") == saved["checkpoint"]
    first, last, lost = (changes_of(tmp_path, step, "trainable") for step in (1, 4, 3))
    near = max(float((first[key] - last[key]).abs().max()) for key in first)
    far = max(float((first[key] - lost[key]).abs().max()) for key in first)
    assert near < 1e-5  # a step with 1e-4 of the rate moves a weight by about 3e-7
    assert far > 1e-3
    steps = [path.name for path in sorted((tmp_path / "weights").iterdir())]
    assert steps[0] == "000001"


@pytest.mark.parametrize("is_gone", [False, True])
def test_critic_goes_on_with_the_smaller_rate_at_its_place_on_the_curve_after_a_restart_as_well(
    is_gone: bool, model_dir: Path, tmp_path: Path
) -> None:
    make = lambda: made(PPO, **COMMON, **GROUPS, keep=1, critic_warmup=1, critic_lr=1e-3, decay="linear")  # noqa: E731
    bench = bench_of(make, model_dir, tmp_path)

    def place(algorithm: Any) -> tuple[int, float]:
        critic = algorithm._critic
        return critic.updates, critic._settings.lr

    async def work() -> list[tuple[int, float]]:
        async with bench:
            algorithm = bench.scenario.make()
            await algorithm.setup(bench.context())
            await algorithm.step()
            state, live = algorithm.state(), bench.versions()
            bench.kept.add(1)
            for _ in range(2):
                await algorithm.step()
            if is_gone:
                shutil.rmtree(str(state["checkpoint"]))
            await bench.go_back(live)
            await algorithm.go_back(state, rate=0.5)
            again = bench.scenario.make()
            await again.setup(bench.context())
            await again.restore(json.loads(json.dumps(algorithm.state())))
            for one in (algorithm, again):
                await one.step()
            return [place(algorithm), place(again)]

    assert [(4, 5e-4)] * 2 == asyncio.run(work())


def test_missing_state_is_said_and_training_goes_on_from_the_live_weights(model_dir: Path, tmp_path: Path) -> None:
    bench = bench_of(ALGORITHMS["grpo"], model_dir, tmp_path)
    said: list[str] = []

    async def work() -> Any:
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

    assert 3 == asyncio.run(work()).step
    [text] = said
    assert text.endswith("000001 does not exist; training goes on from the live weights with new moments of AdamW")
    served = read_tensors(tmp_path / "weights" / "000001" / "model.safetensors")
    trained = changes_of(tmp_path, 3, "trainable")
    shared = served.keys() & trained.keys()
    assert shared
    assert max(float((served[key] - trained[key]).abs().max()) for key in shared) < 1e-5


async def steps_of(bench: AlgorithmBench, state: Any, count: int, said: list[str] | None = None) -> Any:
    """Return an algorithm that has done `count` steps, starting from `state` if it is given."""
    algorithm = bench.scenario.make()
    await algorithm.setup(replace(bench.context(), say=([] if said is None else said).append))
    if state is not None:
        await algorithm.restore(json.loads(json.dumps(state)))
    for _ in range(count):
        await algorithm.step()
    return algorithm


@pytest.mark.parametrize(
    "name", ["state/000003/trainable.safetensors", "state/000003/state.json", "critic/000003/optimizer.safetensors"]
)
@pytest.mark.parametrize("is_removed", [False, True])
def test_newest_whole_state_is_used_and_named_when_the_last_one_is_damaged(
    name: str, is_removed: bool, model_dir: Path, tmp_path: Path
) -> None:
    bench = bench_of(ALGORITHMS["ppo"], model_dir, tmp_path)
    said: list[str] = []

    async def work() -> Any:
        async with bench:
            algorithm = await steps_of(bench, None, 3)
            file = tmp_path / name
            data = bytearray(file.read_bytes())
            if is_removed:
                file.unlink()
            else:
                data[-1] ^= 1
                file.write_bytes(data)
            again = await steps_of(bench, algorithm.state(), 0, said)
            return again.state(), (await again.step()).step

    state, step = asyncio.run(work())
    assert str(tmp_path.absolute() / "state" / "000002") == state["checkpoint"]
    assert (3, 4) == (state["step"], step)
    [text] = said
    assert all(part in text for part in (name, "step 3", "from the state of step 2"))


@pytest.mark.parametrize("goes_back", [False, True])
def test_files_of_a_checkpoint_are_hashed_once_and_not_on_the_event_loop(
    goes_back: bool, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_of(ALGORITHMS["ppo"], model_dir, tmp_path)
    hashed: list[tuple[str, bool]] = []
    digest = hashlib.file_digest

    def watched(file: Any, name: str) -> Any:
        hashed.append((file.name, threading.current_thread() is threading.main_thread()))
        return digest(file, name)

    async def work() -> None:
        async with bench:
            algorithm = await steps_of(bench, None, 1)
            monkeypatch.setattr(hashlib, "file_digest", watched)
            if goes_back:
                await algorithm.go_back(algorithm.state(), rate=0.5)
            else:
                await steps_of(bench, algorithm.state(), 0)

    asyncio.run(work())

    names = ("state.json", "optimizer.safetensors", "trainable.safetensors")
    files = [str(tmp_path.absolute() / kind / "000001" / name) for kind in ("state", "critic") for name in names]
    assert sorted((file, False) for file in files) == sorted(hashed)


def test_run_whose_saved_states_are_all_damaged_is_not_continued(model_dir: Path, tmp_path: Path) -> None:
    bench = bench_of(ALGORITHMS["grpo"], model_dir, tmp_path)

    async def work() -> None:
        async with bench:
            algorithm = await steps_of(bench, None, 2)
            for file in (tmp_path / "state").glob("*/optimizer.safetensors"):
                file.write_bytes(b"")
            await steps_of(bench, algorithm.state(), 0)

    with pytest.raises(ConfigError, match=r"No saved state of .*000002/optimizer.*000001/optimizer"):
        asyncio.run(work())


@pytest.mark.parametrize("resumed_at", [0, 1, 3])
def test_decay_counts_the_steps_of_the_plan_also_those_without_an_update(
    resumed_at: int, model_dir: Path, tmp_path: Path
) -> None:
    played: list[list[int]] = []

    def reward(response: list[int]) -> float:
        played.append(response)
        return len(played) % 2 if len(played) > 16 else 1.0  # the first two steps of eight rollouts are silent

    make = lambda: made(GRPO, **COMMON, **GROUPS, decay="linear")  # noqa: E731
    play = World(reward).play
    scenario = AlgorithmScenario(make=make, play=play, tunes=("llm",), resources={"llm": Weights(uri=str(model_dir))})
    bench = AlgorithmBench(scenario, tmp_path)

    async def work() -> Any:
        async with bench:
            algorithm = await steps_of(bench, None, resumed_at)
            return await steps_of(bench, algorithm.state() if resumed_at else None, 4 - resumed_at)

    optimizer = asyncio.run(work())._tuned.opened.optimizer
    assert 0.25 * COMMON["lr"] == pytest.approx(optimizer.param_groups[0]["lr"])


def test_pruning_leaves_the_kept_steps(tmp_path: Path) -> None:
    for step in range(1, 6):
        (tmp_path / f"{step:06d}").mkdir()

    prune(tmp_path, step=5, keep=2, kept={2, 9})

    assert ["000002", "000004", "000005"] == sorted(path.name for path in tmp_path.iterdir())
