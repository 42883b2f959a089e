"""The template ``langgraph`` of ``agl init`` runs unchanged, against a scripted model."""

from pathlib import Path

from agl_testing.commands import run_agl
from agl_testing.model_server import Reply, ScriptedModelServer


def test_template_of_a_graph_is_checked_and_tried_with_the_names_of_its_nodes(tmp_path: Path) -> None:
    run_agl("init", "--template", "langgraph", folder=tmp_path)
    with ScriptedModelServer([Reply(text="12 pens"), Reply(text="12")]) as server:
        model = ("--set", f"policy.small.base_url={server.base_url}")
        assert "no problem found" in run_agl("check", "experiment.toml", *model, folder=tmp_path)
        tried = run_agl("dev", "experiment.toml", "-n", "1", *model, folder=tmp_path)
    assert "succeeded, reward 1" in tried
    assert ["write", "check"] == [line.split()[0] for line in tried.splitlines() if line.startswith("  ")]
