"""A whole run whose agent asks for a part of the policy's distribution: overridden, told, counted and shown."""

import asyncio
import json
import logging
from pathlib import Path

import pytest
from click.testing import CliRunner

from agl.errors import ConfigError
from agl_inspect.terminal.program import cli
from agl_run import parse_config
from agl_store_sqlite._store import SQLiteStore
from agl_testing.plugins import PluginFolder

from .conftest import TASKS, TOY

AGENT = """
import openai


def solve(task):
    with openai.OpenAI() as client:
        messages = [{"role": "user", "content": task["question"]}]
        asked = {"temperature": 0.7, "top_p": 0.8, "response_format": {"type": "json_object"}}
        answer = client.chat.completions.create(model="scripted", messages=messages, **asked)
    return float(answer.choices[0].message.content == task["answer"])
"""


@pytest.fixture
def folder(tmp_path: Path, agl_plugins: PluginFolder, monkeypatch: pytest.MonkeyPatch) -> Path:
    agl_plugins.install(TOY, name="sampling-toy")
    (tmp_path / "sampling_agent.py").write_text(AGENT)
    for name, tasks in (("train", TASKS), ("val", TASKS[:1])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-own")
    return tmp_path


def run(
    folder: Path,
    server,
    *,
    sampling: str = "",
    gateway: str = "auto",
    algorithm: bool = True,
    verb: str = "run",
    more: str = "",
    agent: str = "sampling_agent",
):
    rule = f'sampling = "{sampling}"\n' if sampling else ""
    counter = '[[algorithm]]\nuse = "counter"\ntunes = "main"\nparams = { steps = 2 }\n' if algorithm else ""
    (folder / "e.toml").write_text(
        f'[experiment]\nname = "e"\nagent = "{agent}:solve"\ntrain = "train.jsonl"\nval = "val.jsonl"\n'
        f'store = "sqlite:///runs.db"\n[policy.main]\nuse = "served"\nbase_url = "{server.base_url}"\n{rule}'
        f'[gateway]\nuse = "{gateway}"\n{counter}{more}'
    )
    return CliRunner().invoke(cli, [verb, str(folder / "e.toml")])


async def metrics_of(folder: Path) -> dict[str, list[float]]:
    store = SQLiteStore(f"sqlite:///{folder / 'runs.db'}")
    found: dict[str, list[float]] = {}
    for metric in await store.metrics("e"):
        found.setdefault(metric.name, []).append(metric.value)
    await store.close()
    return found


@pytest.mark.parametrize("gateway", ["auto", "none"])
def test_run_overrides_tells_once_counts_and_shows_what_the_agent_asked_for(
    folder: Path, server, gateway: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="agl_run.run"):
        result = run(folder, server, gateway=gateway)
    assert 0 == result.exit_code, result.output
    asked = [(call.json["temperature"], call.json["top_p"]) for call in server.calls]
    assert {(0.7, 0.8): 2, (0.7, 1.0): 12} == {pair: asked.count(pair) for pair in asked}  # two validations of one task
    assert 14 == sum(call.json["response_format"] == {"type": "json_object"} for call in server.calls)

    told = [record.getMessage() for record in caplog.records if "the agent asks for" in record.getMessage()]
    assert ["the agent asks for top_p = 0.8; in training the policy samples from the full distribution"] == [
        text.partition(" (at")[0] for text in told if "top_p" in text
    ]
    assert 1 == sum(text.startswith("the agent asks for response_format = ") for text in told)
    assert any(
        "overridden in 12 training calls, and kept with a biased gradient in 12" in text for text in caplog.messages
    )
    found = asyncio.run(metrics_of(folder))
    assert ([6.0, 6.0], [6.0, 6.0]) == (found["calls_sampling_overridden"], found["calls_sampling_kept"])

    store = str(folder / "runs.db")
    shown = CliRunner().invoke(cli, ["show", "e-1-counter-train-00001-00000-000", "--store", store]).output
    assert "sampled without top_p = 0.8, sampled with response_format = " in shown
    validated = CliRunner().invoke(cli, ["show", "e-1-validate-val-00000-00000-000", "--store", store]).output
    assert "sampled" not in validated


FROZEN = AGENT.replace(
    "    return float",
    """        client.chat.completions.create(model="check", messages=messages, temperature=0)
    return float""",
)

CHECKER = """[policy.check]
use = "served"
base_url = "{url}"
model = "checker"
[[algorithm]]
use = "counter"
name = "teach"
tunes = "check"
params = {{ steps = 1 }}
[schedule]
mode = "sequential"
"""


@pytest.mark.parametrize("gateway", ["auto", "none"])
def test_policy_that_does_not_train_on_a_rollout_samples_as_the_agent_asks(folder: Path, server, gateway: str) -> None:
    """A frozen checker answers in the training of the writer as it does in validation."""
    (folder / "checked_agent.py").write_text(FROZEN)
    result = run(folder, server, gateway=gateway, more=CHECKER.format(url=server.base_url), agent="checked_agent")
    assert 0 == result.exit_code, result.output
    asked = [(call.json["model"][:5], call.json["temperature"], call.json.get("top_p")) for call in server.calls]
    whole, narrow = ("scrip", 0.7, 1.0), ("scrip", 0.7, 0.8)
    # 6 rollouts of a step of the checker, 12 of two steps of the writer, and 2 validations of one task.
    assert (12, 6 + 2) == (asked.count(whole), asked.count(narrow))
    assert (6, 12 + 2) == (asked.count(("check", 1.0, None)), asked.count(("check", 0, None)))


def test_run_that_refuses_says_so_in_the_error_of_its_rollouts(folder: Path, server) -> None:
    result = run(folder, server, sampling="refuse")
    assert 1 == result.exit_code
    assert "the request sets top_p = 0.8, and policy 'main' is in training" in result.output


def test_refusal_needs_the_gateway(folder: Path, server) -> None:
    result = run(folder, server, sampling="refuse", gateway="none")
    assert 1 == result.exit_code
    assert 'policy.main.sampling is "refuse", and only the gateway can refuse calls' in result.output


def test_rule_of_a_policy_that_nothing_trains_is_refused_by_check(folder: Path, server) -> None:
    result = run(folder, server, sampling="keep", algorithm=False, verb="check")
    assert 1 == result.exit_code
    assert "policy.main.sampling is 'keep', and no algorithm tunes 'main'" in result.output


def test_rule_must_be_one_of_three() -> None:
    with pytest.raises(ConfigError, match="sampling"):
        parse_config({"experiment": {"agent": "a:b"}, "policy": {"main": {"use": "served", "sampling": "perhaps"}}})
