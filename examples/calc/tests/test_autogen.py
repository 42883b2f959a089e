"""The AutoGen variant of the example: its data, its agent, and a whole run with a step or two."""

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("autogen_agentchat", reason="needs autogen-agentchat, autogen-ext[openai]")
pytest.importorskip("agl_autogen", reason="needs agl-autogen")

from agl_testing.model_server import Reply, ScriptedModelServer, ToolCall

CALC = Path(__file__).parents[1]
TINY = {
    "experiment.validation_limit": 4,
    "algorithm.sft.params.updates": 2,
    "algorithm.sft.params.updates_per_step": 2,
    "algorithm.grpo.params.steps": 1,
    "algorithm.grpo.params.tasks_per_step": 1,
    "algorithm.grpo.params.group_size": 2,
}
"""Settings that make the experiment small enough for a test."""


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example with its data."""
    folder = tmp_path_factory.mktemp("example") / "calc"
    shutil.copytree(CALC, folder, ignore=shutil.ignore_patterns("out", "tests", "__pycache__"))
    run(folder, "autogen_data.py")
    return folder


def run(folder: Path, *words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=300)
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout


def solve(folder: Path, question: str, server: ScriptedModelServer, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
    return run(folder, "autogen_agent.py", question).strip()


def without_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    text = json.dumps(messages)
    for message in messages:
        for call in message.get("tool_calls") or []:
            text = text.replace(call["id"], "an-id")
    return json.loads(text)


def test_dialogues_are_what_the_agent_sends(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [json.loads(line) for line in (example / "out/autogen/data/dialogues.jsonl").read_text().splitlines()]
    row = next(row for row in rows if len(row["messages"]) == 5)
    *_, called, _, said = row["messages"]
    arguments = called["tool_calls"][0]["function"]["arguments"]
    question = f"What is {json.loads(arguments)['expression']}?"
    steps = [Reply(tool_calls=(ToolCall("calc", arguments),)), Reply(text=said["content"])]

    with ScriptedModelServer(steps) as server:
        answer = solve(example, question, server, monkeypatch)
        last = server.calls[-1].json

    assert said["content"] == answer
    assert without_ids(row["messages"])[:-1] == without_ids(last["messages"])
    assert row["tools"] == last["tools"]


def test_warm_up_and_plain_variant_share_their_tasks(example: Path) -> None:
    run(example, "make_data.py")

    for name in ("train.jsonl", "val.jsonl"):
        assert (example / "out/data" / name).read_text() == (example / "out/autogen/data" / name).read_text()


def test_agent_stops_when_the_tool_is_called_again_and_again(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedModelServer(default=Reply(tool_calls=(ToolCall("calc", {"expression": "1+1"}),))) as server:
        assert "2" == solve(example, "What is 1+1?", server, monkeypatch)
        assert 3 == len(server.calls)


def test_experiment_differs_from_the_plain_one_in_its_agent_only() -> None:
    plain, autogen = (
        tomllib.loads((CALC / name).read_text().replace("out/autogen", "out"))
        for name in ("experiment.toml", "autogen.toml")
    )
    assert ["autogen"] == autogen.pop("tracers")
    for key in ("name", "agent"):
        assert plain["experiment"].pop(key) != autogen["experiment"].pop(key)

    assert plain == autogen


def test_experiment_runs_from_nothing(example: Path) -> None:
    pytest.importorskip("agl_algo_torch", reason="needs agl-algo-torch and torch")
    settings = [word for key, value in TINY.items() for word in ("--set", f"{key}={value}")]
    run(example, str(CALC.parent / "make_model.py"), "--out", "out/autogen")

    result = json.loads(run(example, "-m", "agl", "run", "autogen.toml", "--json", *settings))

    assert 1 == result["steps"]["grpo"]
    assert ["calc-lm"] == list(result["resources"])
    assert [0.0, 0.0] == [result["before"], result["after"]]
    assert "agent 'calculator'" in run(
        example, "-m", "agl", "why", "latest", "--store", "sqlite:///out/autogen/runs.db"
    )


def test_large_model_runs_the_same_experiment() -> None:
    folder = Path(__file__).parents[1]
    small, large = (tomllib.loads((folder / name).read_text()) for name in ("experiment.toml", "large.toml"))
    changed = [{key: config.pop(key) for key in ("algorithm", "policy")} for config in (small, large)]

    assert small == large
    assert ["verl"] == [table["use"] for table in changed[1]["algorithm"]]
    assert changed[0]["policy"].keys() == changed[1]["policy"].keys()
