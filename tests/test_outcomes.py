"""An agent that misbehaves: recorded with a readable outcome, stopped in time, and no harm to any other rollout.

What the experiment itself cannot use, a backend without token ids, a port that is taken, a store of a newer release,
is one paragraph that says what to do.
"""

import asyncio
import json
import shlex
import socket
import sqlite3
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.request import urlopen

import pytest
from click.testing import CliRunner

import agl
import agl_run
from agl.algorithms import algorithm
from agl.contracts import RolloutQuery
from agl.errors import AglError, ConfigError, MissingTokenIdsError, SchemaVersionError
from agl.schemas import LLM, Attempt, Rollout
from agl_inspect.terminal.program import cli
from agl_run import Quiet, policy
from agl_store_sqlite._store import SQLiteStore
from agl_testing.model_server import Reply, ScriptedModelServer

AGENT = """
import asyncio, json, os, sys, time
from pathlib import Path


def beat(task, pause):
    for _ in range(400):
        with open(task["beats"], "a") as file:
            file.write(".")
        yield pause(0.02)


def misbehave(task):
    if task["do"] == "raise":
        raise ValueError("as the task says")
    if task["do"] == "exit":
        sys.exit(3)
    if task["do"] == "hard exit":
        os._exit(7)
    if task["do"] == "cancelled":
        raise asyncio.CancelledError
    if task["do"] == "sleep":
        time.sleep(7)
        Path(task["beats"]).write_text("went on after its time")
    return object() if task["do"] == "wrong" else 1.0


def plain(task):
    if task["do"] == "hang":
        for _ in beat(task, time.sleep):
            pass
    return misbehave(task)


async def coroutine(task):
    if task["do"] == "hang":
        for pause in beat(task, asyncio.sleep):
            await pause
    await asyncio.sleep(0.01)
    return misbehave(task)


if __name__ == "__main__":
    result = plain(json.load(sys.stdin))
    print(json.dumps({"reward": result if result == 1.0 else float("nan")}))
"""

RAISED = ("failed", "ValueError", "as the task says")
IN_PROCESS = {
    "raise": RAISED,
    "hang": ("timeout", "TimeoutError", "the agent ran longer than 1.5 s"),
    "exit": ("failed", "SystemExit", "3"),
    "cancelled": ("failed", "asyncio.exceptions.CancelledError", "CancelledError without a message"),
    "wrong": ("failed", "agl.errors.RunError", "the agent returned object, which is neither a number"),
}
IN_TASK = {**IN_PROCESS, "cancelled": ("failed", "asyncio.CancelledError", "the agent raised CancelledError")}
IN_CHILD = {
    "hard exit": ("failed", "ProcessExit", "ended with exit code 7 in the middle of the attempt"),
    "sleep": ("timeout", "TimeoutError", "the agent ran longer than 1.5 s"),
}
AS_COMMAND = {
    "raise": ("failed", "ProcessExit", "exit code 1: ValueError: as the task says"),
    "hang": ("timeout", "TimeoutError", "the command ran longer than 4 s and was stopped"),
    "sleep": ("timeout", "TimeoutError", "the command ran longer than 4 s and was stopped"),
    "exit": ("failed", "ProcessExit", "exit code 3"),
    "hard exit": ("failed", "ProcessExit", "exit code 7"),
    "cancelled": ("failed", "ProcessExit", "CancelledError"),
    "wrong": ("failed", "agl.errors.RunError", "the agent returned nan as a reward"),
}
CASES = [
    ("async", "plain", 1.5, IN_PROCESS),
    ("async", "coroutine", 1.5, IN_TASK),
    ("process", "plain", 1.5, {**IN_PROCESS, **IN_CHILD}),
    ("process", "coroutine", 1.5, {**IN_TASK, "hard exit": IN_CHILD["hard exit"]}),
    ("command", "", 4, AS_COMMAND),
]

Ended = dict[str, tuple[Rollout, Attempt]]


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Signing keys that are this test's alone."""
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.parametrize(("runner", "kind", "limit_s", "expected"), CASES)
def test_misbehaving_agent_is_recorded_stopped_and_harms_no_other_rollout(
    runner: str, kind: str, limit_s: float, expected: dict[str, tuple[str, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "odd_agent.py").write_text(AGENT)
    tasks = [{"do": name, "beats": str(tmp_path / f"{name}.txt")} for name in expected]
    good = [{"do": f"good {n}"} for n in range(len(tasks))]
    agent = f"odd_agent:{kind}" if kind else [sys.executable, str(tmp_path / "odd_agent.py")]
    began = time.monotonic()

    run_all(
        tmp_path,
        agent,
        [task for pair in zip(good, tasks, strict=True) for task in pair],
        runner=agl_run.runner(runner, timeout_s=limit_s),
    )

    ended = outcomes(tmp_path)
    assert expected == {name: seen(ended[name], like=expected[name]) for name in expected}
    assert {("succeeded", "succeeded")} == {
        (rollout.status, attempt.status) for name, (rollout, attempt) in ended.items() if name.startswith("good")
    }
    assert_stopped(tasks, began)
    for name, (_, kind_of_error, message) in expected.items():
        shown = shown_by(f"agl show {ended[name][0].rollout_id} --store {tmp_path}/runs.db")
        assert "experiment-1-validate" in shown
        assert f"{kind_of_error}: " in shown
        assert message[:60] in shown


def assert_stopped(tasks: Sequence[dict[str, str]], began: float) -> None:
    """An agent that ran out of time writes nothing any more, and one that slept never gets to write."""
    hung = next(Path(task["beats"]) for task in tasks if task["do"] == "hang")
    size = hung.stat().st_size
    assert size > 1
    time.sleep(0.3)
    assert size == hung.stat().st_size
    for slept in (Path(task["beats"]) for task in tasks if task["do"] == "sleep"):
        time.sleep(max(0.0, began + 9.0 - time.monotonic()))
        assert not slept.exists()


def run_all(folder: Path, agent: Any, tasks: Sequence[Any], **settings: Any) -> agl.Trainer:
    """Run every task once, four at a time."""
    made = agl.Trainer(store=f"sqlite:///{folder}/runs.db", folder=folder, n_runners=4, progress=Quiet(), **settings)
    made.fit(agent, val_dataset=tasks)
    return made


def outcomes(folder: Path) -> Ended:
    """Every rollout with its only attempt, by what its task says."""

    async def look() -> Ended:
        store = SQLiteStore(f"sqlite:///{folder}/runs.db")
        found: Ended = {}
        for rollout in await store.rollouts(RolloutQuery()):
            (attempt,) = await store.attempts(rollout.rollout_id)
            found[rollout.task["do"]] = (rollout, attempt)
        await store.close()
        return found

    return asyncio.run(look())


def seen(ended: tuple[Rollout, Attempt], *, like: tuple[str, str, str]) -> tuple[str, str, str]:
    """The end of an attempt; its message is cut to the expected part where it contains that."""
    rollout, attempt = ended
    assert "failed" == rollout.status
    assert attempt.error is not None
    message = like[2] if like[2] in attempt.error.message else attempt.error.message
    return attempt.status, attempt.error.type, message


def shown_by(message: str) -> str:
    """The output of the ``agl show`` that a message proposes at its end."""
    found = CliRunner().invoke(cli, ["show", *shlex.split(message.rpartition("agl show ")[2])])
    assert 0 == found.exit_code, found.output
    return found.output


async def silent(task: Any) -> float:
    """Makes no model call."""
    return 1.0


async def ask(task: dict[str, str], llm: LLM) -> float:
    """Makes one model call."""
    import openai

    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        messages = [{"role": "user", "content": task["question"]}]
        await client.chat.completions.create(model=llm.model, messages=messages)
    return 1.0


def counting(folder: Path, base_url: str, **settings: Any) -> agl.Trainer:
    """A trainer with the toy algorithm, which trains on tokens."""
    return agl.Trainer(
        algorithm=algorithm("counter", tunes="main", steps=1),
        policies={"main": policy("served", base_url=base_url)},
        store=f"sqlite:///{folder}/runs.db",
        folder=folder,
        progress=Quiet(),
        **settings,
    )


TASKS = [{"question": f"what is {n}?"} for n in range(3)]


@pytest.mark.parametrize("gateway", ["gateway", "none"])
def test_agent_without_a_model_call_is_an_error_that_says_what_to_check(
    gateway: str, toy: str, server: ScriptedModelServer, tmp_path: Path
) -> None:
    with pytest.raises(AglError, match="NoModelCallsError: the agent finished and no model call was seen") as failure:
        counting(tmp_path, server.base_url, gateway=gateway).fit(silent, train_dataset=TASKS)

    assert "none of 6 rollouts can be used: 6 failed" in str(failure.value)
    shown = shown_by(str(failure.value))
    assert "agl.errors.NoModelCallsError: the agent finished and no model call was seen" in shown


def test_agent_of_dspy_without_a_model_call_is_explained_by_its_cache(
    toy: str, server: ScriptedModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dspy", ModuleType("dspy"))
    with pytest.raises(AglError, match=r"DSPy answers repeated questions from its cache.*cache=False"):
        counting(tmp_path, server.base_url, gateway="none").fit(silent, train_dataset=TASKS)


def test_agent_whose_only_model_calls_are_not_recorded_is_an_error_that_names_its_client(
    toy: str, server: ScriptedModelServer, tmp_path: Path
) -> None:
    def past_the_record(task: dict[str, Any]) -> float:
        body = json.dumps({"model": "scripted", "messages": [{"role": "user", "content": task["question"]}]})
        with urlopen(f"{server.base_url}/chat/completions", data=body.encode(), timeout=30) as answer:
            answer.read()
        return 1.0

    with pytest.raises(AglError, match="6 model calls that were not recorded, made by urllib") as failure:
        counting(tmp_path, server.base_url, gateway="none").fit(past_the_record, train_dataset=TASKS)

    shown = shown_by(str(failure.value))
    assert "none of its model calls was recorded: they are by urllib to 127.0.0.1. Point these clients" in " ".join(
        shown.split()
    )


@pytest.mark.parametrize("gateway", ["gateway", "none"])
def test_backend_without_token_ids_is_an_error_before_anything_is_trained(
    gateway: str, toy: str, tmp_path: Path
) -> None:
    with (
        ScriptedModelServer(default=Reply(text="ok"), flavour="plain") as plain,
        pytest.raises(MissingTokenIdsError, match="returned no token ids for any of 6 calls") as failure,
    ):
        counting(tmp_path, plain.base_url, gateway=gateway).fit(ask, train_dataset=TASKS)

    assert "torch policy, vLLM or SGLang" in str(failure.value)


def test_port_in_use_is_named_before_the_first_rollout(
    agl: Callable[..., Any], experiment: Callable[..., Path]
) -> None:
    file = experiment(steps=1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file.write_text(file.read_text() + f"\n[gateway]\nparams = {{ port = {port} }}\n")
        process = agl("run", str(file), cwd=file.parent)
        _, errors = process.communicate(timeout=60)

    assert 1 == process.returncode
    assert str(port) in errors
    assert "in use" in errors
    assert "Traceback" not in errors


def test_store_of_a_newer_release_is_refused_and_left_alone(tmp_path: Path) -> None:
    run_all(tmp_path, silent, ["a"])
    with sqlite3.connect(tmp_path / "runs.db") as db:
        db.execute("UPDATE agl_schema SET version = 999")
    db.close()

    with pytest.raises(SchemaVersionError, match="999"):
        run_all(tmp_path, silent, ["a"], name="other")

    with sqlite3.connect(tmp_path / "runs.db") as db:
        assert (999,) == db.execute("SELECT version FROM agl_schema").fetchone()
        assert (1,) == db.execute("SELECT count(*) FROM rollouts").fetchone()
    db.close()


def test_setting_of_the_wrong_kind_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="timeout_s"):
        run_all(tmp_path, silent, ["a"], runner=agl_run.runner(timeout_s="soon"))

    assert not (tmp_path / "runs.db").exists()
