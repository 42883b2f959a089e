"""The template ``prompt`` of ``agl init`` runs as it is written, against a scripted model."""

from pathlib import Path

import pytest

from agl_testing.commands import run_agl
from agl_testing.model_server import Reply, ScriptedModelServer


@pytest.mark.long
def test_template_to_tune_a_prompt_is_checked_and_tried(tmp_path: Path) -> None:
    run_agl("init", "--template", "prompt", folder=tmp_path)
    with ScriptedModelServer([Reply(text="12")] * 4) as server:
        model = ("--set", f"policy.small.base_url={server.base_url}")
        assert "apo: apo tunes answer_prompt\nno problem found" in run_agl(
            "check", "experiment.toml", *model, folder=tmp_path
        )
        assert "succeeded, reward 1" in run_agl("dev", "experiment.toml", "-n", "1", *model, folder=tmp_path)
        (call,) = server.calls
    question = "A box holds 3 pens. How many pens do 4 boxes hold?"
    prompt = call.json["messages"][0]["content"].strip()
    assert f"Answer the question with a number only.\n{question}" == prompt
