"""``agl replay --fork``: a run recorded with a real client and server is continued differently from one call on."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("openai", exc_type=ImportError)

import msgspec

from agl.contracts import FORK, TRAINED_POLICIES, ForkPlan, RolloutQuery, Upstream, fork_of, trains
from agl.schemas import Rollout, to_json
from agl_inspect.terminal.program import cli
from agl_replay.forking import ForkedRollout, ForkReport, judged
from agl_run.parts.counterfactual import as_fork
from agl_run.runners.attempt import upstreams_of
from agl_store_sqlite._store import SQLiteStore
from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer

AGENT = """
import os
from openai import OpenAI

import agl

def solve(task, llm, style):
    with OpenAI(base_url=llm.endpoint, api_key="k", max_retries=0) as client:
        said = []
        for role in ("plan", "write", "check"):
            with agl.operation(role):
                noise = os.environ.get("FORK_NOISE", "") if role == "write" else ""
                text = f"{style.template} {role} {task['q']} {' '.join(said)}{noise}"
                try:
                    messages = [{"role": "user", "content": text}]
                    answer = client.chat.completions.create(model=llm.model, messages=messages)
                except Exception:
                    if not os.environ.get("FORK_STUBBORN"):
                        raise
                    continue
                said.append(answer.choices[0].message.content)
    return float("right" in said)
"""
EXPERIMENT = """
[experiment]
name = "sums"
agent = "fork_cli_agent:solve"
store = "sqlite:///runs/agl.db"
train = "tasks.jsonl"

[gateway]
use = "none"

[policy.main_llm]
use = "openai"
model = "scripted"
base_url = "{url}"
api_key_env = ""

[resource.style]
template = "{style}"
"""


class Team:
    """An experiment with an agent of three calls, and the server that answers them."""

    def __init__(self, folder: Path, server: ScriptedModelServer) -> None:
        self.folder, self.server = folder, server
        self.write("calm")

    def write(self, style: str) -> None:
        text = EXPERIMENT.format(url=self.server.base_url, style=style)
        (self.folder / "sums.toml").write_text(text, encoding="utf-8")

    def rollouts(self, experiment: str = "sums-fork") -> list[Rollout]:
        return asyncio.run(self._rollouts(RolloutQuery(experiment=experiment)))

    async def _rollouts(self, query: RolloutQuery) -> list[Rollout]:
        store = self.open()
        try:
            return await store.rollouts(query)
        finally:
            await store.close()

    async def enqueue(self, *rollouts: Rollout) -> None:
        store = self.open()
        try:
            await store.enqueue(rollouts)
        finally:
            await store.close()

    def open(self) -> SQLiteStore:
        return SQLiteStore(f"sqlite:///{self.folder}/runs/agl.db")


def invoke(*args: str, code: int = 0) -> Any:
    result = CliRunner().invoke(cli, args, catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Team]:
    """Record a run whose second call was answered ``wrong [bold]``; from now on the server says ``right``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGL_STORE", raising=False)
    monkeypatch.delitem(sys.modules, "fork_cli_agent", raising=False)
    (tmp_path / "fork_cli_agent.py").write_text(AGENT, encoding="utf-8")
    (tmp_path / "tasks.jsonl").write_text('{"q": "2+2"}\n', encoding="utf-8")

    written = ["wrong [bold]"]

    def respond(request: ModelRequest) -> Reply:
        return Reply(text=written[-1] if " write " in request.turns[0].text else "ok")

    with ScriptedModelServer(respond=respond) as server:
        team = Team(tmp_path, server)
        invoke("dev", "sums.toml", "-n", "1")
        written.append("right")
        server.clear_calls()
        yield team


def test_forks_answer_the_calls_before_from_the_record_and_the_others_by_the_model(team: Team) -> None:
    report = json.loads(invoke("replay", "--fork", "sums-dev", "--at", "2", "--json").stdout)
    assert (0.0, 1.0, 2, 3, "write") == tuple(report[key] for key in ("reward", "mean", "call", "calls", "agent"))
    assert [(1, 2, 1.0)] * 10 == [
        (each["replayed_calls"], each["model_calls"], each["reward"]) for each in report["forks"]
    ]
    assert 10 * 2 == len(team.server.calls)
    assert "so it went wrong at call 2 or later; --at 3 tells the two apart" in report["verdict"]


def test_fork_after_the_mistake_does_as_the_recorded_run_did(team: Team) -> None:
    output = invoke("replay", "--fork", "sums-dev", "--at", "3", "--n", "2").stdout
    assert "mean reward 0, 2 forks; recorded reward 0" in output
    assert "nothing shows that call 3 or a later one decided it" in output


def test_forks_are_rollouts_with_their_origin_and_of_the_recorded_group(team: Team) -> None:
    invoke("replay", "--fork", "sums-dev", "--at", "2", "--n", "2", "--file", "sums.toml")
    (recorded,) = team.rollouts("sums-dev")
    forks = team.rollouts()
    assert [recorded.rollout_id] * 2 == [fork_of(each).rollout_id for each in forks]
    assert [0, 1] == [fork_of(each).sample for each in forks]
    assert {(recorded.group_id, "test", 1)} == {(each.group_id, each.mode, each.retry.max_attempts) for each in forks}
    assert forks[0].metadata["seed"] != forks[1].metadata["seed"]
    shown = invoke("show", "latest").stdout
    assert (
        f"fork of {recorded.rollout_id} from call 2 by write on; answers from the recording: 1, of models: 2" in shown
    )
    assert 2 == invoke("runs", "--experiment", "sums-fork").stdout.count(" test ")


@pytest.mark.parametrize("mode", ["train", "val", "test"])
def test_models_sample_for_a_fork_as_in_the_mode_of_its_recorded_rollout(mode: Any) -> None:
    recorded = Rollout(rollout_id="r", task={}, mode=mode)
    again = Rollout(rollout_id="f", task={}, mode="test")
    fork = as_fork(again, ForkPlan(rollout_id="r", span_id="s"), of=recorded, metadata={})
    assert (mode == "train") == trains(fork, "main")
    given = Upstream(name="main", base_url="http://127.0.0.1:1", sampling="override")
    assert ("override" if mode == "train" else "") == upstreams_of(fork, [given])[0].sampling
    assert "test" == fork.mode
    assert not trains(msgspec.structs.replace(again, metadata={FORK: "mine"}), "main")


def test_models_that_did_not_train_on_the_recorded_rollout_sample_for_a_fork_as_the_agent_asks() -> None:
    recorded = Rollout(rollout_id="r", task={}, mode="train", metadata={TRAINED_POLICIES: ["main"]})
    again = Rollout(rollout_id="f", task={}, mode="test")
    fork = as_fork(again, ForkPlan(rollout_id="r", span_id="s"), of=recorded, metadata={})
    assert [True, False] == [trains(fork, name) for name in ("main", "judge")]


def test_list_of_calls_escapes_what_models_said(team: Team) -> None:
    output = invoke("replay", "--fork", "latest").stdout
    assert ["1", "2", "3"] == [line.split()[0] for line in output.splitlines()[1:]]
    assert "wrong [bold]" in output
    points = json.loads(invoke("replay", "--fork", "latest", "--json").stdout)
    assert ["plan", "write", "check"] == [point["agent"] for point in points]


@pytest.mark.parametrize("is_stubborn", [False, True])
def test_divergence_fails_the_fork_whatever_the_agent_makes_of_it(
    team: Team, monkeypatch: pytest.MonkeyPatch, is_stubborn: bool
) -> None:
    monkeypatch.setenv("FORK_NOISE", " at noon")
    monkeypatch.setenv("FORK_STUBBORN", "1" if is_stubborn else "")
    report = json.loads(invoke("replay", "--fork", "sums-dev", "--at", "3", "--n", "2", "--json", code=1).stdout)
    assert [(True, None, "failed", 1, 0)] * 2 == [
        tuple(each[key] for key in ("is_diverged", "reward", "status", "replayed_calls", "model_calls"))
        for each in report["forks"]
    ]
    assert "Due was call 2 of sums-dev" in report["forks"][0]["error"]
    assert "is 'calm write 2+2 ok at noon'" in report["forks"][0]["error"]
    assert report["mean"] is None
    assert [] == team.server.calls
    assert (
        "2 of 2: DivergenceError: write made a request"
        in invoke("replay", "--fork", "sums-dev", "--at", "3", "--n", "2", code=1).stdout
    )


def test_prompts_are_those_of_the_recorded_rollout(team: Team) -> None:
    team.write("hasty")
    report = json.loads(invoke("replay", "--fork", "sums-dev", "--at", "2", "--n", "2", "--json").stdout)
    assert 1.0 == report["mean"]
    assert all(call.json["messages"][0]["content"].startswith("calm") for call in team.server.calls)


def test_fork_of_a_fork_goes_on_from_it(team: Team) -> None:
    invoke("replay", "--fork", "sums-dev", "--at", "2", "--n", "1")
    report = json.loads(invoke("replay", "--fork", "latest", "--at", "3", "--n", "2", "--json").stdout)
    assert (1.0, 1.0) == (report["reward"], report["mean"])


@pytest.mark.long
def test_processes_of_their_own_fork_as_well(team: Team) -> None:
    text = (team.folder / "sums.toml").read_text(encoding="utf-8")
    (team.folder / "sums.toml").write_text(f'{text}\n[runner]\nuse = "process"\n', encoding="utf-8")
    report = json.loads(invoke("replay", "--fork", "sums-dev", "--at", "2", "--n", "1", "--json").stdout)
    assert [(1, 2, 1.0)] == [(each["replayed_calls"], each["model_calls"], each["reward"]) for each in report["forks"]]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("latest", "--at", "9"), "--at 9 is beyond the last model call (3) of sums-dev"),
        (("nope", "--at", "1"), "unknown rollout 'nope'"),
        (("latest", "--at", "1", "--file", "missing.toml"), "no experiment file 'missing.toml'"),
    ],
)
def test_what_is_not_there_is_named(team: Team, args: tuple[str, ...], said: str) -> None:
    assert said in invoke("replay", "--fork", *args, code=1).output


def test_rollout_of_an_experiment_whose_file_is_not_here_asks_for_it(team: Team) -> None:
    (team.folder / "sums.toml").rename(team.folder / "elsewhere.txt")
    (team.folder / "broken.toml").write_text("[", encoding="utf-8")
    output = invoke("replay", "--fork", "latest", "--at", "1", code=1).output
    assert (
        "belongs to the experiment 'sums-dev', and no file here describes it; name its file: agl replay --fork sums-dev"
        in output
    )


def test_command_runner_is_refused(team: Team) -> None:
    text = (team.folder / "sums.toml").read_text(encoding="utf-8").replace('"fork_cli_agent:solve"', '["true"]')
    (team.folder / "sums.toml").write_text(f'{text}\n[runner]\nuse = "command"\n', encoding="utf-8")
    assert "which the 'command' runner cannot do" in invoke("replay", "--fork", "latest", "--at", "1", code=1).output


def test_rollouts_without_a_recording_are_refused(team: Team) -> None:
    asyncio.run(team.enqueue(Rollout(rollout_id="ro-waits", task={}, experiment="other")))
    assert "is still queued; fork it once it has ended" in invoke("replay", "--fork", "ro-waits", code=1).output


def test_metadata_of_the_users_own_called_fork_is_shown_as_it_is(team: Team) -> None:
    asyncio.run(team.enqueue(Rollout(rollout_id="ro-own", task={}, metadata={FORK: "mine"})))
    assert "fork of" not in invoke("show", "ro-own").stdout


def report(reward: float | None, *rewards: float | None, call: int = 2) -> ForkReport:
    forks = [
        ForkedRollout(
            rollout_id=f"f{number}",
            status="failed" if each is None else "succeeded",
            reward=each,
            model_calls=1,
            replayed_calls=1,
            is_diverged=False,
            error="",
        )
        for number, each in enumerate(rewards)
    ]
    return judged(
        ForkReport(
            rollout_id="r",
            call=call,
            calls=3,
            span_id="s",
            agent="",
            reward=reward,
            is_complete=True,
            forks=forks,
        )
    )


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (report(0.0, *[1.0] * 9), "do better than the recorded run, evidence 44 to 1, so it went wrong at call 2 or"),
        (report(0.0, *[1.0] * 9, call=3), "went wrong at call 3"),
        (report(1.0, *[0.0] * 9), "do worse than the recorded run, evidence 44 to 1, which owes its reward to call 2"),
        (report(0.0, *[1.0] * 8), "evidence 25 to 1, and 40 to 1 is needed; about 9 forks would do, see --n"),
        (report(0.5, 1.0), "evidence 1.2 to 1, and 40 to 1 is needed; about 16 forks would do"),
        (report(1.0, 1.0, 1.0), "nothing shows that call 2 or a later one decided it"),
        (report(0.5, *[0.0, 1.0] * 20, 0.55), "nothing shows that call 2 or a later one decided it"),
        (report(0.5, 0.0, 1.0), "--at with a number below 2 looks before it"),
        (report(0.5, 0.0, 1.0, call=1), "what this task usually brings"),
        (report(0.5, None, None), "no fork has a reward"),
        (report(None, 1.0, 1.0), "the recorded rollout has no reward"),
    ],
)
def test_verdict_follows_from_the_evidence(found: ForkReport, verdict: str) -> None:
    assert verdict in found.verdict
    json.loads(to_json(found))
