"""The example with pictures: its data, its agent, its reward, and a whole run with a step or two."""

import base64
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agl_vision", reason="needs agl-vision")

from agl_testing.model_server import Reply, ScriptedModelServer

GLANCE = Path(__file__).parents[1]
TINY = {
    "experiment.validation_limit": 4,
    "algorithm.sft.params.updates": 2,
    "algorithm.sft.params.updates_per_step": 2,
    "algorithm.grpo.params.steps": 1,
    "algorithm.grpo.params.tasks_per_step": 1,
    "algorithm.grpo.params.group_size": 2,
}
"""Settings that make the experiment small enough for a test."""

ONE = """
[experiment]
agent = "agent:solve"
store = "sqlite:///out/one.db"
train = "out/one.jsonl"
hidden = ["letters"]

[[reward]]
use = "reward:Letters"

[policy.glance-lm]
use = "openai"
base_url = "{url}"
model = "any"
api_key_env = ""
"""


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example with its data."""
    folder = tmp_path_factory.mktemp("example") / "glance"
    shutil.copytree(GLANCE, folder, ignore=shutil.ignore_patterns("out", "tests", "__pycache__"))
    run(folder, "make_data.py")
    return folder


def run(folder: Path, *words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=300)
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"out/data/{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def pictures_of(message: dict[str, Any]) -> list[str]:
    return [part["image_url"]["url"] for part in message["content"] if part["type"] == "image_url"]


def test_dialogues_are_what_the_agent_sends(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = lines(example, "dialogues")[0]
    asked, said = row["messages"][::2], [message["content"] for message in row["messages"][1::2]]
    names = [f"{number}.png" for number in range(6)]
    for name, url in zip(names, (url for message in asked for url in pictures_of(message)), strict=True):
        (example / name).write_bytes(base64.b64decode(url.partition(",")[2]))

    with ScriptedModelServer([Reply(text=text) for text in said]) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        answer = run(example, "agent.py", *names).strip()
        sent = [call.json["messages"] for call in server.calls]

    assert "".join(said) == answer
    assert [row["messages"][:1], row["messages"][:3], row["messages"][:5]] == sent


def test_exchanged_tasks_have_the_pictures_of_another_task(example: Path) -> None:
    val, exchanged = lines(example, "val"), lines(example, "exchanged")

    assert [task["letters"] for task in val] == [task["letters"] for task in exchanged]
    assert [task["pictures"] for task in val[1:] + val[:1]] == [task["pictures"] for task in exchanged]


def test_experiment_runs_from_nothing(example: Path) -> None:
    pytest.importorskip("agl_algo_torch", reason="needs agl-algo-torch and torch")
    dialogues = example / "out/data/dialogues.jsonl"
    first = dialogues.read_text(encoding="utf-8").splitlines(keepends=True)[:64]
    dialogues.write_text("".join(first), encoding="utf-8")
    settings = [word for key, value in TINY.items() for word in ("--set", f"{key}={value}")]
    run(example, "make_model.py")

    result = json.loads(run(example, "-m", "agl", "run", "experiment.toml", "--json", *settings))
    why = run(example, "-m", "agl", "why", "latest", "--store", "sqlite:///out/runs.db")
    metrics = [json.loads(line) for line in (example / "out/glance/metrics.jsonl").read_text().splitlines()]

    assert 1 == result["steps"]["grpo"]
    assert ["glance-lm"] == list(result["resources"])
    assert 0.0 == next(m["value"] for m in metrics if (m["algorithm"], m["name"]) == ("grpo", "dropped_share"))
    assert "non_token_input" not in why


def test_reward_counts_the_letters_of_each_turn(example: Path) -> None:
    task = lines(example, "train")[0]
    first, second, third = (task["letters"][at : at + 2] for at in (0, 2, 4))
    (example / "out/one.jsonl").write_text(json.dumps(task), encoding="utf-8")
    with ScriptedModelServer([Reply(text=text) for text in (first, f"{second[0]}?", f"{third}A")]) as server:
        (example / "one.toml").write_text(ONE.format(url=server.base_url), encoding="utf-8")
        run(example, "-m", "agl", "dev", "one.toml")

    query = "select name, value from rewards"
    found = run(example, "-m", "agl", "sql", query, "--csv", "--store", "sqlite:///out/one.db")
    assert ["letters,0.5", "turn,1.0", "turn,0.5", "turn,0.0"] == found.split()[1:]
