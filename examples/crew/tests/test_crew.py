"""The example with CrewAI: its data, its crew, its files, and a whole run with a step or two."""

import json
import shutil
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("crewai", reason="needs crewai")
pytest.importorskip("agl_crewai", reason="needs agl-crewai")

from agl import PluginManager
from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer, ToolCall

CREW = Path(__file__).parents[1]
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
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the example with its data."""
    folder = tmp_path_factory.mktemp("example") / "crew"
    shutil.copytree(CREW, folder, ignore=shutil.ignore_patterns("out", "tests", "__pycache__"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in worker_env().items():
            patch.setenv(name, value)
        run(folder, "make_data.py")
        yield folder


def worker_env() -> dict[str, str]:
    manager = PluginManager.from_environment()
    return dict(manager.build(manager.tracer("crewai")).worker_env())


def run(folder: Path, *words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=300)
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def is_lead(messages: list[dict[str, Any]]) -> bool:
    return messages[0]["content"].startswith("You are lead.")


def without_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    text = json.dumps(messages)
    for message in messages:
        for call in message.get("tool_calls") or []:
            text = text.replace(call["id"], "an-id")
    return json.loads(text)


def test_tasks_have_the_answers_of_the_store_and_are_not_trained_on(example: Path) -> None:
    with closing(sqlite3.connect(example / "out/data/stock.db")) as store:
        counts = {str(part): str(count) for part, count in store.execute("SELECT part, count FROM parts")}
    train, val = (lines(example / f"out/data/{name}.jsonl") for name in ("train", "val"))
    taught = (example / "out/data/dialogues.jsonl").read_text(encoding="utf-8")

    answers = {f"How many of part {part} are in stock?": count for part, count in counts.items()}
    assert [answers[task["question"]] for task in train + val] == [task["answer"] for task in train + val]
    assert set() == {task["question"] for task in train} & {task["question"] for task in val}
    assert [] == [task for task in train + val if task["question"] in taught]


def test_dialogues_are_what_the_crew_sends(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = lines(example / "out/data/dialogues.jsonl")
    clerk, lead = next(
        (clerk, lead)
        for clerk, lead in zip(rows[::2], rows[1::2], strict=True)
        if len(clerk["messages"]) == len(lead["messages"]) == 5
    )
    part = json.loads(clerk["messages"][2]["tool_calls"][0]["function"]["arguments"])["part"]

    def respond(request: ModelRequest) -> Reply:
        row = lead if is_lead(request.body["messages"]) else clerk
        answer = row["messages"][len(request.body["messages"])]
        calls = (call["function"] for call in answer.get("tool_calls") or [])
        return Reply(
            text=answer["content"] or "", tool_calls=tuple(ToolCall(call["name"], call["arguments"]) for call in calls)
        )

    with ScriptedModelServer(respond=respond) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        answer = run(example, "agent.py", f"How many of part {part} are in stock?").strip()
        asked = [call.json for call in server.calls]

    assert lead["messages"][-1]["content"] == answer.splitlines()[-1]
    assert [True, False, False, True] == [is_lead(request["messages"]) for request in asked]
    for row, request in ((clerk, asked[2]), (lead, asked[3])):
        assert without_ids(row["messages"])[:-1] == without_ids(request["messages"])
        assert row["tools"] == request["tools"]


def test_large_experiment_differs_in_policy_and_algorithm_only() -> None:
    small, large = (
        tomllib.loads((CREW / name).read_text(encoding="utf-8")) for name in ("experiment.toml", "large.toml")
    )
    policies, algorithms = ([file.pop(key) for file in (small, large)] for key in ("policy", "algorithm"))

    assert small == large
    assert [["crew-lm"], ["crew-lm"]] == [list(policy) for policy in policies]
    assert ["lead", "lead"] == [algorithm[-1]["agents"] for algorithm in algorithms]


def test_experiment_runs_from_nothing(example: Path) -> None:
    pytest.importorskip("agl_algo_torch", reason="needs agl-algo-torch and torch")
    settings = [word for key, value in TINY.items() for word in ("--set", f"{key}={value}")]
    run(example, str(CREW.parent / "make_model.py"))

    result = json.loads(run(example, "-m", "agl", "run", "experiment.toml", "--json", *settings))

    assert 1 == result["steps"]["grpo"]
    assert ["crew-lm"] == list(result["resources"])
    assert [0.0, 0.0] == [result["before"], result["after"]]
    assert "agent 'lead'" in run(example, "-m", "agl", "why", "latest", "--store", "sqlite:///out/runs.db")
