"""The harness example: its modules, its dialogues, and a whole run with a step or two. pi is the real one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agl_harness", reason="needs agl-harness")
pytest.importorskip("agl_algo_torch", reason="needs agl-algo-torch and torch")

HARNESS = Path(__file__).parents[1]
TINY = {
    "experiment.validation_limit": 2,
    "experiment.validate_every": 0,
    "algorithm.sft.params.updates": 2,
    "algorithm.sft.params.updates_per_step": 2,
    "algorithm.grpo.params.steps": 1,
    "algorithm.grpo.params.tasks_per_step": 1,
    "algorithm.grpo.params.group_size": 2,
}
"""Settings that make the experiment small enough for a test."""

MODULE = """\
import json
from dataclasses import asdict
import bugs
print(json.dumps([asdict(bug) | {"source": bug.source, "tests": bug.tests(4)} for bug in bugs.make_many(200, seed=7)]))
"""


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """The environment with pi, which is installed beside nox's environments where that is needed."""
    if shutil.which("npm") is None:
        pytest.skip("needs Node.js, which brings npm")
    folder = HARNESS.parents[1] / ".nox" / "harnesses"
    variables = {"AGL_HARNESSES": str(folder), **os.environ}
    command = [sys.executable, "-m", "agl", "harness", "install", "pi"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"pi cannot be installed here: {done.stderr.strip()}")
    return variables


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example") / "harness"
    return Path(shutil.copytree(HARNESS, folder, ignore=shutil.ignore_patterns("out", "tests", "__pycache__")))


@pytest.fixture(scope="module")
def data(example: Path, environment: dict[str, str]) -> Path:
    run(example, "make_data.py", environment=environment)
    return example / "out" / "data"


def run(folder: Path, *words: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def passed(bug: dict[str, Any], part: str) -> int:
    """Return how many of a module's cases hold with a part in its gap."""
    names: dict[str, Any] = {}
    exec(bug["source"].replace(bug["wrong"], part), names)
    return sum(_holds(names[bug["name"]], arguments, expected) for arguments, expected in bug["cases"])


def _holds(function: Any, arguments: list[Any], expected: Any) -> bool:
    try:
        return bool(function(*arguments) == expected)
    except TypeError:
        return False


def test_hidden_tests_tell_the_repair_from_the_bug_and_from_a_careless_one(example: Path) -> None:
    for bug in json.loads(run(example, "-c", MODULE)):
        assert 1 == bug["source"].count(bug["wrong"]), bug["source"]
        assert (0, 4) == (passed(bug, bug["wrong"]), passed(bug, bug["right"])), bug["source"]
        assert passed(bug, bug["other"]) < 4, bug["source"]


def test_hidden_tests_run(example: Path, tmp_path: Path) -> None:
    bug = json.loads(run(example, "-c", MODULE))[0]
    (tmp_path / f"{bug['name']}.py").write_text(bug["source"].replace(bug["wrong"], bug["right"]))
    (tmp_path / "test_hidden.py").write_text(bug["tests"])

    done = subprocess.run([sys.executable, "-m", "unittest"], cwd=tmp_path, capture_output=True, text=True)

    assert 0 == done.returncode, done.stderr
    assert "Ran 4 tests" in done.stderr


def test_no_validation_module_is_ever_trained_on(data: Path) -> None:
    def modules(mode: str) -> set[str]:
        paths = (data / "workspaces").glob(f"{mode}-*/*.py")
        return {path.read_text(encoding="utf-8") for path in paths if not path.name.startswith("test_")}

    dialogues = (data / "dialogues.jsonl").read_text(encoding="utf-8")
    train, val = modules("train"), modules("val")

    assert (96, 24) == (len(train), len(val))
    assert set() == train & val
    assert [] == [module for module in val if json.dumps(module)[1:-1] in dialogues]


def test_dialogues_are_what_pi_sends(example: Path, data: Path, environment: dict[str, str]) -> None:
    code = """\
import json, random, bugs, make_data
from pathlib import Path
first, other = bugs.make_many(2, seed=3)
sent, again = (make_data.record(bug, Path("again") / bug.name) for bug in (first, other))
made = make_data.dialogue(other, other.right, recording=sent, rng=random.Random(0))
attempt = made["messages"][0]["content"].split("/workspaces/")[1].split("/")[0]
print(json.dumps([made, attempt, again.messages, again.tools, again.attempt_id, first.name, other.name]))
"""
    made, attempt, messages, tools, real, first, other = json.loads(run(example, "-c", code, environment=environment))
    *made_messages, said = made["messages"]
    head = made_messages[0]["content"].replace(attempt, real).replace(f"again/{first}/", f"again/{other}/")

    assert tools == made["tools"]
    assert messages[0]["content"] == head
    assert [plain(message) for message in messages[1:]] == [plain(message) for message in made_messages[1:]]
    assert {"role": "assistant", "content": f"Repaired {other}.py."} == said


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without ids, with its content as text and its arguments read."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return {
        "role": message["role"],
        "content": text,
        "calls": [(call["name"], json.loads(call["arguments"])) for call in calls],
    }


def test_all_that_pi_sends_is_in_the_models_prompt_and_short(example: Path, data: Path) -> None:
    code = f"""\
import json, sys, tomllib
from pathlib import Path
sys.path.insert(0, {str(HARNESS.parent)!r})
import make_model
spec = tomllib.loads(Path("model.toml").read_text())
texts = make_model.rendered([Path("out/data/dialogues.jsonl")], template=spec["template"])[:50]
tokenizer = make_model.make_tokenizer(texts, spec)
ids = [tokenizer(text)["input_ids"] for text in texts]
print(json.dumps([texts, [tokenizer.decode(row) for row in ids], [len(row) for row in ids]]))
"""
    texts, decoded, lengths = json.loads(run(example, "-c", code))
    row = rows_of(data / "dialogues.jsonl")[0]

    assert texts == decoded
    assert row["messages"][0]["content"] in texts[0]
    assert all(json.dumps(tool["function"]["description"])[1:-1] in texts[0] for tool in row["tools"])
    assert ["read", "bash", "edit", "write"] == [tool["function"]["name"] for tool in row["tools"]]
    assert max(lengths) < 300 < 5000 < len(texts[0])


def test_the_whole_experiment_runs(example: Path, data: Path, environment: dict[str, str]) -> None:
    run(example, str(HARNESS.parent / "make_model.py"), environment=environment)
    settings = [word for key, value in TINY.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    result = json.loads(
        run(example, "-m", "agl", "run", "experiment.toml", "--json", *settings, environment=environment)
    )

    assert 1 == result["steps"]["grpo"]
    assert [0.0, 0.0] == [result["before"], result["after"]]
    calls = run(example, "-m", "agl", "data", "export", "--format", "transitions", "--store", "sqlite:///out/runs.db")
    seen = [json.loads(line) for line in calls.splitlines()]
    assert 6 <= len({row["rollout_id"] for row in seen})
    assert {"llm"} == {row["policy"] for row in seen}


def test_demo_says_what_is_missing_without_node(example: Path, tmp_path: Path) -> None:
    variables = {**os.environ, "PATH": str(tmp_path), "AGL_HARNESSES": str(tmp_path / "none")}
    done = subprocess.run([sys.executable, "demo.py"], cwd=example, env=variables, capture_output=True, text=True)

    assert 0 != done.returncode
    assert "install Node.js" in done.stderr
