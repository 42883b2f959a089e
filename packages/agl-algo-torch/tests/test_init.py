"""The templates of ``agl init`` that train weights run: ``weights`` with a tiny model, the others with their own."""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agl_inspect.terminal.program import cli
from agl_run.cli.init import TEMPLATES

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


@pytest.mark.long
@pytest.mark.parametrize("template", ["tiny", "weights-langgraph"])
def test_template_that_makes_its_model_learns(template: str, tmp_path: Path) -> None:
    python = shlex.quote(sys.executable)
    made = TEMPLATES[template].command.replace("python", python, 1)
    for command in (f"{python} -m agl init -t {template}", made, f"{python} -m agl run experiment.toml --quiet"):
        done = subprocess.run(shlex.split(command), cwd=tmp_path, capture_output=True, text=True, check=True)
    (before, after) = re.findall(r"reward: ([\d.]+) before, ([\d.]+) after", done.stdout)[0]
    assert float(before) < 0.2 < 0.7 < float(after)
