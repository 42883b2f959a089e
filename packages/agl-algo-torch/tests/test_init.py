"""The template ``weights`` of ``agl init`` runs as it is written, with a tiny model."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHANGED = (
    "experiment.validation_limit=1",
    "policy.small.model=model",
    "policy.small.threads=1",
    "policy.small.max_tokens=4",
    "algorithm.params.steps=1",
    "algorithm.params.tasks_per_step=2",
    "algorithm.params.group_size=2",
)


def agl(*words: str, folder: Path) -> str:
    """The output of a command, which must succeed."""
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    command = [sys.executable, "-m", "agl", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout


def test_template_to_train_weights_runs(tmp_path: Path, make_loaded: Callable[..., Any]) -> None:
    loaded = make_loaded()
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    agl("init", "--template", "weights", folder=tmp_path)
    settings = [word for change in CHANGED for word in ("--set", change)]

    agl("run", "experiment.toml", *settings, folder=tmp_path)
    (metrics,) = tmp_path.rglob("metrics.jsonl")
    assert '"grpo"' in metrics.read_text()
