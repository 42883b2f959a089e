"""VERL's trainer on a cluster to which the runner ``ray`` is connected, with the agents in that cluster's workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("agl_ray", reason="needs agl-ray, which places the workers")
pytest.importorskip("agl_algo_torch", reason="needs agl-algo-torch, which serves the policy")
pytest.importorskip("openai", reason="needs openai, which the example's agent calls with")

PATIENCE_S = 1800
"""Timeout in seconds for a busy machine; on an idle one, everything here takes about two minutes."""

SETTINGS = {
    "experiment.validation_limit": 2,
    "runner.use": "ray",
    "runner.concurrency": 8,
    "runner.params.address": "local",
    "runner.params.max_workers": 2,
    "runner.params.wait_s": 120,
    "runner.params.cluster.num_cpus": 24,
    "runner.params.cluster.num_gpus": 1,
    "algorithm.verl.params.trainer.total_training_steps": 2,
    "algorithm.verl.params.data.train_batch_size": 2,
    "algorithm.verl.params.actor_rollout_ref.rollout.n": 8,
}


def train(folder: Path, **changes: object) -> subprocess.CompletedProcess[str]:
    given = {**SETTINGS, **changes}
    words = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "agl", "run", "verl-ray-cpu.toml", *words]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "0", "RAY_AUTH_MODE": "disabled"}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, env=variables, check=False
    )


@pytest.mark.soak
@pytest.mark.timeout(2 * PATIENCE_S)
def test_verl_trains_on_the_cluster_of_the_runner_that_places_its_agents(calc: Path) -> None:
    key = "algorithm.verl.params.ray_kwargs.ray_init.num_cpus"
    brief = dict.fromkeys(("algorithm.sft.params.updates", "algorithm.sft.params.updates_per_step"), 2)
    refused = train(calc, **brief, **{key: 8})
    assert "ray_kwargs.ray_init = {'num_cpus': 8} has no effect, because the runner connects this process" in (
        refused.stdout + refused.stderr
    )
    done = train(calc, **{"experiment.name": "beside"})
    assert 0 == done.returncode, done.stdout + done.stderr
    metrics = calc / "out/verl-ray/beside/metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    found = {row["step"]: row["value"] for row in rows if (row["algorithm"], row["name"]) == ("verl", "loss")}
    assert [1, 2] == sorted(found)
