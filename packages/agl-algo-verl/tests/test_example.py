"""The calculator example trained by VERL: a whole run from the command line, small, with the torch policy serving."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from agl_inspect.terminal.program import cli

pytest.importorskip("agl_algo_torch", reason="needs agl-algo-torch, which serves the policy")
pytest.importorskip("openai", reason="needs openai, which the example's agent calls with")

TINY = {
    "experiment.validation_limit": 4,
    "algorithm.sft.params.updates": 2,
    "algorithm.sft.params.updates_per_step": 2,
    "algorithm.verl.params.trainer.total_training_steps": 2,
    "algorithm.verl.params.data.train_batch_size": 2,
    "algorithm.verl.params.actor_rollout_ref.rollout.n": 2,
}
"""Settings that make the experiment small enough for a test."""


def test_the_example_runs_and_its_model_can_be_taken_away(calc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(calc)
    # In a process of its own: the algorithm itself must prepare VERL's environment, as `conftest.py` does here.
    words = ["run", "verl-inproc.toml", *(w for name, value in TINY.items() for w in ("--set", f"{name}={value}"))]
    done = subprocess.run([sys.executable, "-m", "agl", *words], capture_output=True, text=True, timeout=300)
    assert 0 == done.returncode, done.stdout + done.stderr
    rows = [json.loads(line) for line in Path("out/verl/calc-verl/metrics.jsonl").read_text().splitlines()]
    gaps = [row["value"] for row in rows if (row["algorithm"], row["name"]) == ("verl", "logprob_gap")]
    assert 2 == len(gaps)
    assert max(gaps) < 1e-5
    store = ("--store", "sqlite:///out/verl/runs.db")
    done = CliRunner().invoke(cli, ["data", "export", "calc-lm", "--format", "model", "--output", "mine", *store])
    assert 0 == done.exit_code, done.output
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in Path("mine").iterdir()}
