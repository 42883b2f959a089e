"""The template ``weights`` of ``agl init`` runs unchanged with a tiny model."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agl_inspect.terminal.program import cli

CHANGED = (
    "experiment.validation_limit=1",
    "policy.small.model=model",
    "policy.small.threads=1",
    "policy.small.max_tokens=4",
    "algorithm.params.steps=1",
    "algorithm.params.tasks_per_step=2",
    "algorithm.params.group_size=2",
)


def test_template_to_train_weights_runs(
    tmp_path: Path, make_loaded: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = make_loaded()
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delitem(sys.modules, "agent", raising=False)
    settings = [word for change in CHANGED for word in ("--set", change)]

    for command in (["init", "-t", "weights"], ["run", "experiment.toml", *settings]):
        result = CliRunner().invoke(cli, command)
        assert 0 == result.exit_code, result.output
    (metrics,) = tmp_path.rglob("metrics.jsonl")
    assert '"grpo"' in metrics.read_text()
