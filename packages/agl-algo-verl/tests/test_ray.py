"""VERL's own trainer on a real Ray cluster on the CPU: three steps, kill -9, the step in flight again, export."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from agl.schemas import Weights
from agl_algo_verl.engines import make
from agl_algo_verl.policy import VerlPolicy
from agl_testing.conformance import AlgorithmScenario
from agl_testing.conformance.bench import AlgorithmBench

from .world import World, config

pytest.importorskip("agl_algo_torch", reason="needs agl-algo-torch, which serves the policy")
pytest.importorskip("openai", reason="needs openai, which the example's agent calls with")

if TYPE_CHECKING:
    from collections.abc import Callable

CALC = Path(__file__).parents[3] / "examples" / "calc"
PATIENCE_S = 900
"""Seconds on a machine that is busy; idle, everything here takes about two minutes."""

TINY = {
    "experiment.validation_limit": 2,
    "algorithm.sft.params.updates": 2,
    "algorithm.sft.params.updates_per_step": 2,
    "algorithm.verl.params.trainer.total_training_steps": 4,
    "algorithm.verl.params.data.train_batch_size": 2,
    "algorithm.verl.params.actor_rollout_ref.rollout.n": 4,
}
"""What makes the experiment small enough for a test."""


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "agl", *words]


def run(folder: Path, words: list[str]) -> str:
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, env=environment(), check=False
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "0"}


def metrics(folder: Path, name: str) -> dict[int, float]:
    """A number of VERL's by step; a step that was logged twice is an error."""
    file = folder / "out/verl-ray/run/metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    found = [(row["step"], row["value"]) for row in rows if (row["algorithm"], row["name"]) == ("verl", name)]
    assert len(found) == len(dict(found))
    return dict(found)


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not what():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.2)


def wait_for_the_end(processes: list[psutil.Process], *, patience_s: float) -> None:
    end = time.monotonic() + patience_s
    while left := [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < end, left
        time.sleep(0.2)


@pytest.mark.skipif(sys.platform == "win32", reason="VERL runs on Linux and macOS")
def test_a_run_on_ray_is_killed_and_continues_and_its_model_can_be_taken_away(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(CALC, tmp_path / "calc", ignore=shutil.ignore_patterns("out", "tests")))
    run(folder, [sys.executable, "make_data.py", "--out", "out/data"])
    run(folder, [sys.executable, "make_model.py", "--data", "out/data", "--out", "out/model"])
    changes = [word for name, value in TINY.items() for word in ("--set", f"{name}={value}")]
    words = command("run", "verl-ray-cpu.toml", *changes)
    with (tmp_path / "log.txt").open("w") as log:
        first = subprocess.Popen(words, cwd=folder, stdout=log, stderr=subprocess.STDOUT, text=True, env=environment())
    wait_for(lambda: 3 in metrics(folder, "loss"), first)
    started = psutil.Process(first.pid).children(recursive=True)
    working = [p for p in started if "Agent" not in p.name()]
    assert {"raylet", "ray::HFServer"} <= {p.name() for p in working}
    first.send_signal(signal.SIGKILL)
    first.wait()
    wait_for_the_end(working, patience_s=60)

    run(folder, [*words, "--resume"])
    wait_for_the_end(started, patience_s=120)  # Ray's agents look for its raylet and give up after a minute
    assert [1, 2, 3, 4] == sorted(metrics(folder, "loss"))
    assert max(metrics(folder, "probability_gap").values()) < 1e-5
    store = ("--store", "sqlite:///out/verl-ray/runs.db")
    run(folder, command("export", "calc-lm", "--format", "model", "--output", "mine", *store))
    trained = AutoModelForCausalLM.from_pretrained(folder / "mine").state_dict()
    start = AutoModelForCausalLM.from_pretrained(folder / "out/model").state_dict()
    assert any(not torch.equal(tensor, start[name]) for name, tensor in trained.items())


def one_step(folder: Path, model_dir: Path, **keys: Any) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """What a step reports and the weights after it, with rollouts of two rows each."""
    scenario = AlgorithmScenario(
        make=lambda: make(threads=1, **config(**{"trainer.total_training_steps": 1, **keys}), **engine),
        play=World(rows=2).play,
        tunes=("llm",),
        policies=lambda _: {"llm": VerlPolicy(name="llm", model=str(model_dir), threads=1)},
    )
    engine = {"engine": "ray" if "rollout.name" in keys else "inproc"}

    async def body() -> tuple[dict[str, float], Weights]:
        async with AlgorithmBench(scenario, folder) as bench:
            algorithm = scenario.make()
            try:
                await algorithm.setup(bench.context())
                report = await algorithm.step()
            finally:
                await algorithm.close()
            weights = bench.published[-1].resource
            assert isinstance(weights, Weights)
            return dict(report.metrics), weights

    metrics, weights = asyncio.run(body())
    return metrics, dict(AutoModelForCausalLM.from_pretrained(weights.uri).state_dict())


def test_a_step_on_ray_is_the_step_in_one_process(model_dir: Path, tmp_path: Path) -> None:
    keys = {"actor.loss_agg_mode": "seq-mean-token-mean"}  # the mode in which VERL counts rows and agl rollouts
    here, expected = one_step(tmp_path / "inproc", model_dir, **keys)
    there, found = one_step(tmp_path / "ray", model_dir, **keys, **{"rollout.name": "agl_hf"})
    assert [] == [p for p in psutil.Process().children(recursive=True) if "ray" in " ".join(p.cmdline())]
    assert (16.0, 8.0) == (there["rows"], there["rollouts"])
    assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=1e-4)
    assert here["loss"] == pytest.approx(there["loss"], abs=1e-6)
    start = AutoModelForCausalLM.from_pretrained(model_dir).state_dict()
    # Adam's first step has the sign of each gradient, and where that is rounding only, the order of rows decides it.
    wrong = sum(float((found[name] - tensor).square().sum()) for name, tensor in expected.items())
    moved = sum(float((tensor - start[name]).square().sum()) for name, tensor in expected.items())
    assert (wrong / moved) ** 0.5 < 0.05
