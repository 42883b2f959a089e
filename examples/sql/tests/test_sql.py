"""The SQL example: its data, its agent, and a whole run with a step or two."""

import json
import shutil
import sqlite3
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langgraph", reason="needs langgraph, langchain-openai")
pytest.importorskip("agl_langchain", reason="needs agl-langchain")
pytest.importorskip("agl_rewards", reason="needs agl-rewards")

from agl_run import load_config
from agl_testing.model_server import Reply, ScriptedModelServer

SQL = Path(__file__).parents[1]
TINY = {
    "experiment.validation_limit": 3,
    "algorithm.sft-check.params.updates": 2,
    "algorithm.sft-write.params.updates": 2,
    "algorithm.sft-write.params.updates_per_step": 2,
    "algorithm.grpo.params.steps": 1,
    "algorithm.grpo.params.tasks_per_step": 1,
    "algorithm.grpo.params.group_size": 2,
}
"""Settings that make the experiment small enough for a test."""


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example") / "sql"
    return Path(shutil.copytree(SQL, folder, ignore=shutil.ignore_patterns("out", "tests", "__pycache__")))


@pytest.fixture(scope="module")
def data(example: Path) -> Path:
    run(example, "make_data.py")
    return example / "out" / "data"


def run(folder: Path, *words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=300)
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def answer(folder: Path, question: str, replies: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[str]]:
    """Ask the agent as a person would; returns what it printed and how the model's instructions began."""
    with ScriptedModelServer([Reply(text=text) for text in replies]) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        said = run(folder, "agent.py", "out/data/films.db", question)
    return said, [" ".join(call.json["messages"][0]["content"].split()[:3]) for call in server.calls]


def test_data_follows_from_the_seed(example: Path, data: Path) -> None:
    run(example, "make_data.py", "--out", "again")
    run(example, "make_data.py", "--out", "other", "--seed", "1")

    for path in sorted(data.iterdir()):
        assert path.read_bytes() == (example / "again" / path.name).read_bytes(), path.name
        assert path.read_bytes() != (example / "other" / path.name).read_bytes(), path.name


def test_every_query_has_an_answer(data: Path) -> None:
    for task in [*rows_of(data / "train.jsonl"), *rows_of(data / "val.jsonl")]:
        connection = sqlite3.connect(data / task["database"])
        rows = connection.execute(task["query"]).fetchall()
        connection.close()

        assert rows not in ([], [(None,)], [(0,)]), task


def test_no_validation_question_is_ever_trained_on(data: Path) -> None:
    train = {task["question"] for task in rows_of(data / "train.jsonl")}
    val = {task["question"] for task in rows_of(data / "val.jsonl")}
    texts = "\n".join((data / name).read_text(encoding="utf-8") for name in ("write.jsonl", "check.jsonl"))

    assert (600, 120) == (len(train), len(val))
    assert set() == train & val
    assert [] == [question for question in val if question in texts]


def test_the_checker_is_taught_the_truth(data: Path) -> None:
    for row in rows_of(data / "check.jsonl"):
        _, told, said = (message["content"] for message in row["messages"])
        result = told.splitlines()[-1]

        assert said.startswith("no") == result.startswith("error"), row


def test_the_agent_rewrites_what_failed(example: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replies = ["SELECT value FROM films", "no, it failed", "```sql\nSELECT COUNT(*) FROM films\n```", "yes"]
    said, asked = answer(example, "How many films are there?", replies, monkeypatch)

    assert "SELECT COUNT(*) FROM films\n1 rows: 60\n" == said
    assert ["Answer with one", "Did the query", "The query failed.", "Did the query"] == asked


def test_the_agent_gives_up_after_two_rewrites(example: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, asked = answer(example, "How many?", ["SELECT value FROM films", "no"] * 3, monkeypatch)

    assert "SELECT value FROM films\nerror: no such column: value\n" == said
    assert 6 == len(asked)


def test_the_agent_cannot_change_a_database(example: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (data / "films.db").read_bytes()
    said, _ = answer(example, "Go on.", ["DELETE FROM films", "yes"], monkeypatch)

    assert "DELETE FROM films\nerror: attempt to write a readonly database\n" == said
    assert before == (data / "films.db").read_bytes()


def test_the_whole_experiment_runs(example: Path, data: Path) -> None:
    run(example, str(SQL.parent / "make_model.py"))
    result = json.loads(run(example, "-m", "agl", "run", "experiment.toml", "--json", *sets(TINY)))
    calls = run(example, "-m", "agl", "data", "export", "--format", "transitions", "--store", "sqlite:///out/runs.db")

    assert 1 == result["steps"]["grpo"]
    assert {"check_llm", "main_llm"} == set(result["resources"])
    assert "sql-1-sft-check-1" == result["resources"]["check_llm"]
    seen = {(row["agent"], row["policy"]) for row in map(json.loads, calls.splitlines())}
    assert {("write", "main_llm"), ("check", "check_llm")} <= seen
    assert seen <= {("write", "main_llm"), ("rewrite", "main_llm"), ("check", "check_llm")}


def test_the_large_model_runs_the_same_experiment() -> None:
    small, large = (tomllib.loads((SQL / name).read_text()) for name in ("experiment.toml", "large.toml"))
    models = {name: config["use"] for name, config in large["policy"].items()}
    (algorithm,) = large["algorithm"]

    assert {"main_llm": "torch", "check_llm": "torch"} == models
    assert ("verl", "main_llm", "write|rewrite") == (algorithm["use"], algorithm["tunes"], algorithm["agents"])
    assert without_models(small) == without_models(large)
    assert "check" == load_config(SQL / "large.toml").policy["check_llm"].agents


def without_models(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("policy", "algorithm")}


def sets(values: dict[str, Any]) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")]
