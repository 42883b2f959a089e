"""The template ``measure`` of ``agl init`` runs as it is written, against a scripted model."""

import os
import subprocess
import sys
from pathlib import Path

from agl_testing.model_server import Reply, ScriptedModelServer


def agl(*words: str, folder: Path) -> str:
    """The output of a command, which must succeed."""
    environment = {**os.environ, "OPENAI_API_KEY": "none", "XDG_STATE_HOME": str(folder / "state")}
    command = [sys.executable, "-m", "agl", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout


def test_template_to_measure_is_checked_tried_and_run(tmp_path: Path) -> None:
    agl("init", folder=tmp_path)
    with ScriptedModelServer([Reply(text="54")] * 20) as server:
        model = ("--set", f"policy.small.base_url={server.base_url}")
        assert "no problem found" in agl("check", "experiment.toml", *model, folder=tmp_path)
        assert "succeeded, reward 0" in agl("dev", "experiment.toml", "-n", "1", *model, folder=tmp_path)
        assert "0.167" in agl("run", "experiment.toml", *model, folder=tmp_path)  # one of six answers is 54
