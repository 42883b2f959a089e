"""The template ``measure`` of ``agl init`` runs as it is written, against a scripted model."""

from pathlib import Path

from agl_testing.commands import run_agl
from agl_testing.model_server import Reply, ScriptedModelServer


def test_template_to_measure_is_checked_tried_and_run(tmp_path: Path) -> None:
    run_agl("init", folder=tmp_path)
    with ScriptedModelServer([Reply(text="54")] * 20) as server:
        model = ("--set", f"policy.small.base_url={server.base_url}")
        assert "no problem found" in run_agl("check", "experiment.toml", *model, folder=tmp_path)
        assert "succeeded, reward 0" in run_agl("dev", "experiment.toml", "-n", "1", *model, folder=tmp_path)
        assert "0.167" in run_agl("run", "experiment.toml", *model, folder=tmp_path)  # one of six answers is 54
