"""The template ``langgraph`` of ``agl init`` runs as it is written, against a scripted model."""

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


def test_template_of_a_graph_is_checked_and_tried_with_the_names_of_its_nodes(tmp_path: Path) -> None:
    agl("init", "--template", "langgraph", folder=tmp_path)
    with ScriptedModelServer([Reply(text="12 pens"), Reply(text="12")]) as server:
        model = ("--set", f"policy.small.base_url={server.base_url}")
        assert "no problem found" in agl("check", "experiment.toml", *model, folder=tmp_path)
        tried = agl("dev", "experiment.toml", "-n", "1", *model, folder=tmp_path)
    assert "succeeded, reward 1" in tried
    assert ["write", "check"] == [line.split()[0] for line in tried.splitlines() if line.startswith("  ")]
