"""The retrieval example: its wiki and questions, its agent, and a whole run with a step or two."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents", reason="needs openai-agents")
pytest.importorskip("agl_openai_agents", reason="needs agl-openai-agents")
pytest.importorskip("agl_rewards", reason="needs agl-rewards")

from agl_testing.model_server import Reply, ScriptedModelServer, ToolCall

RAG = Path(__file__).parents[1]
QUESTION = re.compile(r"What is the (\w+) of the (\w+) of ([\w ]+)\?")
PASSAGE = re.compile(r"The (\w+) of ([\w ]+) is ([\w ]+)\.")
NAME = re.compile(r"[A-Z][a-z]+ [A-Z][a-z]+")
FEWER = ("--dialogues", "180")
TINY = {
    "experiment.validation_limit": 4,
    "algorithm.sft.params.updates": 2,
    "algorithm.sft.params.updates_per_step": 2,
    "algorithm.grpo.params.steps": 1,
    "algorithm.grpo.params.tasks_per_step": 1,
    "algorithm.grpo.params.group_size": 2,
}
"""Settings that make the experiment small enough for a test."""

Search = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example") / "rag"
    return Path(shutil.copytree(RAG, folder, ignore=shutil.ignore_patterns("out", "tests", "__pycache__")))


@pytest.fixture(scope="module")
def data(example: Path) -> Path:
    run(example, "make_data.py", *FEWER)
    return example / "out" / "data"


@pytest.fixture(scope="module")
def model(example: Path, data: Path) -> Path:
    pytest.importorskip("agl_algo_torch", reason="needs agl-algo-torch and torch")
    run(example, str(RAG.parent / "make_model.py"))
    return data.parent / "model"


@pytest.fixture(scope="module")
def search(data: Path) -> Search:
    spec = importlib.util.spec_from_file_location("rag_wiki", RAG / "wiki.py")
    wiki = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wiki)
    return cache(lambda query: wiki.search(data / "wiki.db", query))


def run(folder: Path, *words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=150)
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def tasks_of(data: Path) -> list[dict[str, Any]]:
    return [*rows_of(data / "train.jsonl"), *rows_of(data / "val.jsonl")]


def hops(search: Search, question: str) -> list[tuple[str, ...]]:
    """Relation, subject and value of the best passage of each of the two searches."""
    end, hop, name = QUESTION.fullmatch(question).groups()
    first = PASSAGE.fullmatch(search(f"{hop} of {name}")[0]).groups()
    second = PASSAGE.fullmatch(search(f"{end} of {first[2]}")[0]).groups()
    return [first, second]


def names_in(search: Search, tasks: list[dict[str, Any]]) -> set[str]:
    """Everybody whom the questions, or the passages that answer them, are about."""
    return {name for task in tasks for _, name, _ in hops(search, task["question"])}


def answer(folder: Path, server: ScriptedModelServer, monkeypatch: pytest.MonkeyPatch, *, question: str) -> str:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    return run(folder, "agent.py", "--base-url", server.base_url, "--model", "scripted", question).strip()


def test_data_follows_from_the_seed(example: Path, data: Path) -> None:
    run(example, "make_data.py", "--out", "again", *FEWER)
    run(example, "make_data.py", "--out", "other", "--seed", "1", *FEWER)

    for path in sorted(data.glob("*.jsonl")):
        assert path.read_bytes() == (example / "again" / path.name).read_bytes(), path.name
        assert path.read_bytes() != (example / "other" / path.name).read_bytes(), path.name


def test_two_searches_answer_every_question(data: Path, search: Search) -> None:
    tasks = tasks_of(data)

    assert 1096 == len(tasks)
    assert [task["answer"] for task in tasks] == [hops(search, task["question"])[1][2] for task in tasks]


def test_one_search_finds_no_second_hop(data: Path, search: Search) -> None:
    for task in rows_of(data / "val.jsonl"):
        relation, name, value = hops(search, task["question"])[1]

        assert f"The {relation} of {name} is {value}." not in search(task["question"])


def test_nobody_in_the_validation_questions_was_seen_in_training(data: Path, search: Search) -> None:
    held_out = names_in(search, rows_of(data / "val.jsonl"))
    trained = names_in(search, rows_of(data / "train.jsonl"))
    taught = set(NAME.findall((data / "dialogues.jsonl").read_text(encoding="utf-8")))

    assert held_out
    assert set() == held_out & trained
    assert set() == held_out & taught
    assert set() == trained & taught


def test_dialogues_are_what_the_agent_sends(example: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(row for row in rows_of(data / "dialogues.jsonl") if len(row["messages"]) == 7)
    *sent, last = row["messages"]
    asked = [message["tool_calls"][0]["function"] for message in sent if "tool_calls" in message]
    replies = [Reply(tool_calls=(ToolCall(call["name"], call["arguments"]),)) for call in asked]

    with ScriptedModelServer([*replies, Reply(text=last["content"])]) as server:
        said = answer(example, server, monkeypatch, question=sent[1]["content"])
        request = server.calls[-1].json

    assert last["content"] == said
    assert [plain(message) for message in sent] == [plain(message) for message in request["messages"]]
    assert [signature(tool) for tool in row["tools"]] == [signature(tool) for tool in request["tools"]]


def plain(message: dict[str, Any]) -> tuple[Any, ...]:
    """Role, text and calls, without the ids of calls."""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return message["role"], message.get("content"), calls


def signature(tool: dict[str, Any]) -> tuple[str, list[str]]:
    """The chat template's text for a tool."""
    return tool["function"]["name"], list(tool["function"]["parameters"]["properties"])


def test_agent_that_only_searches_has_no_answer(example: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedModelServer(default=Reply(tool_calls=(ToolCall("search", {"query": "the of"}),))) as server:
        assert "" == answer(example, server, monkeypatch, question="What is it?")
        assert 4 == len(server.calls)
        assert "nothing found" == server.calls[-1].json["messages"][-1]["content"]


def test_large_model_runs_the_same_experiment() -> None:
    small, large = (tomllib.loads((RAG / name).read_text()) for name in ("experiment.toml", "large.toml"))
    algorithms, policies = ([config.pop(key) for config in (small, large)] for key in ("algorithm", "policy"))

    assert small == large
    assert ["torch", "verl"] == [policies[1]["rag-lm"]["use"], algorithms[1][0]["use"]]
    assert {"rag-lm"} == {table["tunes"] for tables in algorithms for table in tables}


def test_searches_copy_tokens_of_the_question(data: Path, model: Path) -> None:
    words = pytest.importorskip("tokenizers").Tokenizer.from_file(str(model / "tokenizer.json"))

    for row in rows_of(data / "dialogues.jsonl"):
        _, question, asked, *_ = row["messages"]
        call = words.encode(asked["tool_calls"][0]["function"]["arguments"]).tokens
        copied = {token for token in call if token.strip("Ġ").isalpha()} - {"query", "the"}

        assert copied <= set(words.encode(question["content"]).tokens)


@pytest.mark.usefixtures("data", "model")
def test_experiment_runs_from_nothing(example: Path) -> None:
    settings = [word for key, value in TINY.items() for word in ("--set", f"{key}={value}")]

    result = json.loads(run(example, "-m", "agl", "run", "experiment.toml", "--json", *settings))

    assert 1 == result["steps"]["grpo"]
    assert ["rag-lm"] == list(result["resources"])
    assert max(result["before"], result["after"]) <= 0.1  # one word has the form of an answer, and none is right
    assert "agent 'searcher'" in run(example, "-m", "agl", "why", "latest", "--store", "sqlite:///out/runs.db")
