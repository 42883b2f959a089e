"""VERL on a GPU: in one process in bfloat16, and with VERL's trainer and vLLM on Ray. Skipped without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch

from .test_inproc import train

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use"),
]
SMALL = {
    "experiment.validation_limit": 2,
    "policy.calc-lm.model": "out/model",
    "algorithm.verl.params.trainer.total_training_steps": 2,
    "algorithm.verl.params.data.train_batch_size": 4,
    "algorithm.verl.params.data.max_prompt_length": 256,
    "algorithm.verl.params.data.max_response_length": 256,
    "algorithm.verl.params.actor_rollout_ref.rollout.n": 4,
    "algorithm.verl.params.actor_rollout_ref.rollout.gpu_memory_utilization": 0.2,
}
"""Settings that make the GPU example small; its model is then the tiny model of the CPU example."""


@pytest.mark.parametrize(
    "keys",
    [
        {"actor.ppo_epochs": 2},
        {"actor.fsdp_config.param_offload": True, "actor.fsdp_config.optimizer_offload": True},
        {"model.lora_rank": 4},
        {"algorithm.adv_estimator": "gae", "actor.use_kl_loss": True},
    ],
    ids=["plain", "offloaded", "adapters", "critic and reference"],
)
def test_training_in_one_process_agrees_with_the_recorded_logprobs(
    model_dir: Path, tmp_path: Path, keys: dict[str, Any]
) -> None:
    metrics, weights = train(tmp_path, model_dir, **{"trainer.total_training_steps": 2, **keys})
    assert 2 == len(metrics)
    assert max(step["logprob_gap"] for step in metrics) < 3e-2
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM beside VERL: pip install 'agl-algo-verl[vllm]'")
def test_vllm_serves_what_verl_trains_on_ray(calc: Path) -> None:
    changes = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
    run(calc, "-m", "agl", "run", "verl-gpu.toml", *changes)
    rows = [json.loads(line) for line in (calc / "out/verl-gpu/calc-verl-gpu/metrics.jsonl").read_text().splitlines()]
    gaps = {row["step"]: row["value"] for row in rows if row["name"] == "logprob_gap"}
    assert [1, 2] == sorted(gaps)
    assert max(gaps.values()) < 3e-2
    assert all(row["value"] == 0 for row in rows if row["name"] == "replica_failures")


def run(folder: Path, *words: str) -> None:
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr
