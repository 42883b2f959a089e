"""The calculator example trained by VERL: a whole run from the command line, small, with the torch policy serving."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("agl_algo_torch", reason="needs agl-algo-torch, which serves the policy")
pytest.importorskip("openai", reason="needs openai, which the example's agent calls with")

CALC = Path(__file__).parents[3] / "examples" / "calc"
TINY = {
    "experiment.validation_limit": 4,
    "algorithm.sft.params.updates": 2,
    "algorithm.sft.params.updates_per_step": 2,
    "algorithm.verl.params.trainer.total_training_steps": 2,
    "algorithm.verl.params.data.train_batch_size": 2,
    "algorithm.verl.params.actor_rollout_ref.rollout.n": 2,
}
"""Settings that make the experiment small enough for a test."""


def run(folder: Path, *words: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=300, env=environment
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout


def test_the_example_runs_and_its_model_can_be_taken_away(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(CALC, tmp_path / "calc", ignore=shutil.ignore_patterns("out", "tests")))
    run(folder, "make_data.py", "--out", "out/data")
    run(folder, str(CALC.parent / "make_model.py"))
    changes = [word for name, value in TINY.items() for word in ("--set", f"{name}={value}")]
    run(folder, "-m", "agl", "run", "verl-inproc.toml", *changes)
    rows = [json.loads(line) for line in (folder / "out/verl/calc-verl/metrics.jsonl").read_text().splitlines()]
    gaps = [row["value"] for row in rows if (row["algorithm"], row["name"]) == ("verl", "logprob_gap")]
    assert 2 == len(gaps)
    assert max(gaps) < 1e-5
    store = ("--store", "sqlite:///out/verl/runs.db")
    run(folder, "-m", "agl", "data", "export", "calc-lm", "--format", "model", "--output", "mine", *store)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in (folder / "mine").iterdir()}
