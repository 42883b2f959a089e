import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agl.contracts import RewardEmitter
from agl.errors import ConfigError
from agl.schemas import LLM, Reward
from agl_rewards.judge import Endpoint, Judge
from agl_testing.conformance.reward import RewardConformance
from agl_testing.model_server import Cut, Garbage, Reply, ScriptedModelServer, Stall, Status

from .cases import chat, one, rollout, setup

TASK = {"question": "What is 6 * 7?", "answer": "42"}
GOOD = Reply(text="It is right.\nScore: 8")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_rewards.judge.BACKOFF_S", 0.01)


@pytest.fixture
def server() -> Iterator[ScriptedModelServer]:
    with ScriptedModelServer(default=GOOD) as server:
        yield server


def judge(server: ScriptedModelServer, **params: Any) -> Judge:
    return Judge(model=Endpoint(base_url=server.base_url, model="scripted"), **params)


def scored(*steps: Any, **params: Any) -> tuple[Reward, int]:
    """Return the reward after these answers of the server, and the number of requests."""
    with ScriptedModelServer(steps, default=None) as server:
        return one(judge(server, **params), TASK, "42"), len(server.calls)


class TestJudge(RewardConformance):
    @pytest.fixture
    def emitter(self, server: ScriptedModelServer) -> RewardEmitter:
        return judge(server)


def test_judge_without_feedback_gives_the_score_and_the_reason_of_a_missing_one() -> None:
    reward, _ = scored(GOOD, feedback=False)
    assert (0.8, "") == (reward.value, reward.feedback)
    missing, _ = scored(Reply(text="no idea"), feedback=False, retries=0)
    assert missing.value is None
    assert "no score: its answer was" in missing.feedback


def test_score_is_scaled_and_the_reason_is_kept(server: ScriptedModelServer) -> None:
    reward = one(judge(server), TASK, "42")
    assert (0.8, "judge", "evaluator") == (reward.value, reward.name, reward.source)
    assert "It is right.\nScore: 8" == reward.feedback
    (call,) = server.calls
    body = call.json
    assert ("scripted", 0.0) == (body["model"], body["temperature"])
    (message,) = body["messages"]
    for part in ("What is 6 * 7?", "<work>\n42\n</work>", "from 0 (not at all) to 10"):
        assert part in message["content"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Score: 0", 0.0),
        ("Score: 10", 1.0),
        ("reason\n\n  Score: 7.5  \n", 0.75),
        ("**Score:** 5", 0.5),
        ("**Score: 5**", 0.5),
        ("Score: 11", None),
        ("Score: -1", None),
        ("Score: 8/10", None),
        ("Score: high", None),
        ("I say Score: 8", None),
        ("Score: 8\nScore: 9", None),
        ("8", None),
        ("", None),
    ],
)
def test_score_is_read_strictly(text: str, value: float | None) -> None:
    reward, asked = scored(Reply(text=text), retries=0)
    assert (value, 1) == (reward.value, asked)
    assert ("no score" in reward.feedback) == (value is None)


@pytest.mark.parametrize(
    "fault", [Status(code=429), Status(code=500), Garbage(), Garbage(body=b"{}"), Cut(), Reply(text="no score")]
)
def test_judge_is_asked_again_when_it_gives_no_score(fault: Any) -> None:
    reward, asked = scored(fault, GOOD)
    assert (0.8, 2) == (reward.value, asked)


def test_judge_that_stays_silent_gives_a_missing_reward_and_never_zero() -> None:
    reward, asked = scored(*[Status(code=503)] * 9, retries=2)
    assert (None, 3) == (reward.value, asked)
    assert "the judge gave no score" in reward.feedback
    assert "503" in reward.feedback


def test_request_that_is_wrong_is_not_repeated() -> None:
    reward, asked = scored(Status(code=400, message="no such model"), GOOD)
    assert (None, 1) == (reward.value, asked)
    assert "no such model" in reward.feedback


def test_judge_that_is_not_there_gives_a_missing_reward() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    endpoint = Endpoint(base_url=f"http://127.0.0.1:{port}/v1", model="m")
    reward = one(Judge(model=endpoint, retries=1), TASK, "42")
    assert reward.value is None
    assert "could not be reached" in reward.feedback


def test_judge_that_is_slow_is_given_up() -> None:
    started = time.monotonic()
    reward, _ = scored(Stall(seconds=60), retries=0, timeout_s=0.3)
    assert reward.value is None
    assert time.monotonic() - started < 40


def test_key_comes_from_the_environment_and_does_not_follow_a_redirect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "the-key")
    with ScriptedModelServer(default=GOOD, api_key="the-key") as server:
        endpoint = Endpoint(base_url=server.base_url, model="m", api_key_env="JUDGE_KEY")
        assert 0.8 == one(Judge(model=endpoint), TASK, "42").value
        with redirecting(f"{server.base_url}/chat/completions") as base_url:
            moved = Endpoint(base_url=base_url, model="m", api_key_env="JUDGE_KEY")
            assert one(Judge(model=moved), TASK, "42").value is None
        assert 1 == len(server.calls)


class redirecting:  # noqa: N801  # used as a context manager
    """Start a server that redirects every request, and yield its base URL."""

    def __init__(self, target: str) -> None:
        from http.server import BaseHTTPRequestHandler, HTTPServer

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self.send_response(302)  # which urllib would follow, key and all
                self.send_header("Location", target)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def test_key_that_is_not_set_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match="needs the environment variable JUDGE_KEY"):
        Judge(model=Endpoint(base_url="http://localhost/v1", model="m", api_key_env="JUDGE_KEY"))


def test_own_template_scale_source_and_request(server: ScriptedModelServer) -> None:
    template = "Q {question} A {text} of {answer}. Braces {{}}. {low}-{high}"
    emitter = judge(server, template=template, score=r"Score: (\d+)", scale=[4, 8], request={"seed": 7})
    assert 1.0 == one(emitter, TASK, "forty-{two}").value
    body = server.calls[0].json
    assert "Q What is 6 * 7? A forty-{two} of 42. Braces {}. 4-8" == body["messages"][0]["content"]
    assert {"model", "messages", "seed"} == set(body)


def test_template_that_asks_for_what_the_task_lacks_is_an_error(server: ScriptedModelServer) -> None:
    with pytest.raises(ConfigError, match="rubric"):
        one(judge(server, template="{text} {rubric}"), TASK, "42")


def test_policy_of_the_experiment_judges(server: ScriptedModelServer) -> None:
    policies = {"judge_lm": LLM(endpoint=server.base_url, model="scripted")}
    assert 0.8 == one(Judge(model="judge_lm", setup=setup(**policies)), TASK, "42").value
    with pytest.raises(ConfigError, match="judge_lm"):
        Judge(model="other", setup=setup(**policies))


def test_many_are_judged_at_once_and_no_more_than_declared() -> None:
    with ScriptedModelServer(default=Reply(text="Score: 1", delay=1.0)) as server:
        emitter = judge(server, concurrency=4)

        async def all_of_them() -> list[Reward]:
            return await asyncio.gather(*(emitter(rollout(TASK), [chat(1, "x")]) for _ in range(8)))

        started = time.monotonic()
        rewards = asyncio.run(all_of_them())
        assert [0.1] * 8 == [reward.value for reward in rewards]
        assert 2.0 <= time.monotonic() - started < 8.0  # one after the other would take 8


@pytest.mark.parametrize(
    "params",
    [
        {"template": "no placeholder"},
        {"template": "{text} {"},
        {"score": "("},
        {"score": r"\d+"},
        {"scale": [1, 1]},
        {"retries": -1},
        {"timeout_s": 0},
        {"concurrency": 0},
    ],
)
def test_parameters_that_mean_nothing_are_refused(server: ScriptedModelServer, params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        judge(server, **params)


@pytest.mark.parametrize(
    "endpoint", [{"base_url": "localhost", "model": "m"}, {"base_url": "http://x/v1", "model": ""}]
)
def test_endpoint_that_is_none_is_refused(endpoint: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="base_url"):
        Judge(model=Endpoint(**endpoint), setup=setup(tmp_path))
