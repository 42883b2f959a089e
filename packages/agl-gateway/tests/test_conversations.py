"""Conversations become rollouts: they run while calls arrive, end when idle or on request, and train."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from click.testing import CliRunner

from agl.contracts import RolloutQuery, Upstream
from agl.episodes import build_episode
from agl.schemas import Episode, ResourceVersion, Reward, Rollout, Span, Weights, new_span_id
from agl.stores import all_spans
from agl_gateway.service import GatewayService
from agl_gateway.settings import Settings
from agl_gateway.traffic.splits import parse_split, pins_of, split_report
from agl_inspect.records import labels as labels
from agl_inspect.terminal.program import cli
from agl_inspect.versions import arms
from agl_run.access.tokens import AttemptTokens
from agl_store_sqlite._store import SQLiteStore
from agl_testing.model_server import Reply, ScriptedModelServer
from agl_testing.waiting import eventually

ADMIN = "an-admin-token-of-the-tests"
CLIENT = "a-client-token-of-the-tests"
SECRET = b"a secret of the gateway's own tests"


@dataclass(frozen=True, kw_only=True)
class Talk:
    """A client of a gateway, in this or another process, with a view of the store."""

    url: str
    store: SQLiteStore

    async def say(self, conversation: str, *texts: str) -> dict[str, str]:
        """Make a call and return the response headers; ``texts`` are all turns so far, beginning with the user's."""
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        body = {"model": "main_llm", "messages": messages}
        return (await self.post("/v1/chat/completions", conversation, body))[1]

    async def end(self, conversation: str) -> dict[str, Any]:
        return (await self.post("/conversations/end", conversation, {}))[0]

    async def post(self, path: str, conversation: str, body: Any, *, key: str = CLIENT, status: int = 200) -> Any:
        headers = {"authorization": f"Bearer {key}"}
        headers |= {"x-agl-conversation-id": conversation} if conversation else {}
        url = f"{self.url}{path}"
        async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as reply:
            answer = await reply.json()
            assert status == reply.status, answer
            return answer, dict(reply.headers)

    async def rollout(self, headers: dict[str, str]) -> Rollout:
        return (await self.store.rollouts(RolloutQuery(ids=(headers["x-agl-rollout-id"],))))[0]

    async def episode(self, headers: dict[str, str]) -> Episode:
        rollout = await self.rollout(headers)
        (attempt,) = await self.store.attempts(rollout.rollout_id)
        return build_episode(rollout, attempt, await all_spans(self.store, rollout.rollout_id))

    async def rate(self, headers: dict[str, str], value: float) -> None:
        span = Span(
            rollout_id=headers["x-agl-rollout-id"],
            attempt_id=headers["x-agl-attempt-id"],
            span_id=new_span_id(),
            name="thumb",
            reward=Reward(value=value, source="human"),
        )
        await self.store.append_spans([span])

    async def until_ended(self, headers: dict[str, str]) -> float:
        """Wait until the conversation is over; returns how many seconds that took."""
        started = time.monotonic()

        async def status() -> str:
            found = (await self.rollout(headers)).status
            return "" if found == "running" else found

        assert "succeeded" == await eventually(status)
        return time.monotonic() - started


def named(headers: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.startswith("x-agl-")}


@pytest.fixture
def backend():
    with ScriptedModelServer(default=Reply(text="yes")) as server:
        yield server


@asynccontextmanager
async def serve(
    folder: Path, backend: ScriptedModelServer, *, idle_s: float = 600.0, split: str = "", client_key: str = CLIENT
) -> AsyncIterator[Talk]:
    """Run a gateway on the folder's database, with a separate store object, as another process would have."""
    store = SQLiteStore(f"sqlite:///{folder}/served.db")
    versions = ("w1", "w2") if split else ("",)
    upstream = Upstream(name="main_llm", base_url=backend.base_url, model="scripted", is_trained=True)
    service = GatewayService(
        store=store,
        upstreams=[msgspec.structs.replace(upstream, model_version=version) for version in versions],
        tokens=AttemptTokens(SECRET),
        settings=Settings(conversation_idle_s=idle_s),
        admin_key=ADMIN,
        client_key=client_key,
        arms=True,
        split=parse_split(split) if split else None,
    )
    try:
        yield Talk(url=await service.start(), store=store)
    finally:
        await service.stop()
        await store.close()


async def test_conversation_is_an_ordinary_training_rollout(tmp_path, backend):
    async with serve(tmp_path, backend) as talk:
        headers = await talk.say("c", "hi")
        assert named(headers) == named(await talk.say("c", "hi", "yes", "why?"))
        before = await talk.rollout(headers)
        assert ("running", "train", "served-conversations") == (before.status, before.mode, before.experiment)
        assert "x-agl-arm" not in headers
        assert {"rollout_id": before.rollout_id, "status": "ended"} == await talk.end("c")
        assert {"rollout_id": before.rollout_id, "status": "ended"} == await talk.end("c")
        await talk.rate(headers, 0.75)
        episode = await talk.episode(headers)
        assert ("succeeded", 0.75) == (episode.rollout.status, episode.reward)
        assert ["", ""] == [call.reject for call in episode.transitions]
        assert sum(len(call.response_ids) // 4 for call in episode.transitions) == sum(
            sum(row.mask) for row in episode.rows
        )
    command = ["data", "export", "--store", f"sqlite:///{tmp_path}/served.db", "--mode", "train", "--min-reward", "0.5"]
    shown = await asyncio.to_thread(CliRunner().invoke, cli, command)
    (line,) = shown.stdout.splitlines()
    assert ["hi", "yes", "why?", "yes"] == [message["content"] for message in json.loads(line)["messages"]]


@pytest.mark.long
async def test_silent_conversation_ends_by_itself_and_what_is_said_later_is_late(tmp_path, backend):
    async with serve(tmp_path, backend, idle_s=4.0) as talk:
        headers = await talk.say("c", "hi")
        for _ in range(6):  # longer than it may be silent
            await asyncio.sleep(0.8)
            assert headers["x-agl-attempt-id"] == (await talk.say("c", "hi"))["x-agl-attempt-id"]
        assert 1.0 < await talk.until_ended(headers)
        again = await talk.say("c", "still there?")
        assert headers["x-agl-attempt-id"] == again["x-agl-attempt-id"]
        calls = (await talk.episode(headers)).transitions
        assert [""] * 7 + ["late"] == [call.reject for call in calls]


async def test_call_in_flight_keeps_its_conversation_open(tmp_path, backend):
    backend.enqueue(Reply(text="at last", delay=2.0))
    async with serve(tmp_path, backend, idle_s=0.4) as talk:
        headers = await talk.say("c", "hi")
        assert [""] == [call.reject for call in (await talk.episode(headers)).transitions]
        await talk.until_ended(headers)


@pytest.mark.long
async def test_call_at_one_gateway_keeps_the_conversation_open_at_the_other(tmp_path, backend):
    async with serve(tmp_path, backend, idle_s=4.0) as one, serve(tmp_path, backend, idle_s=4.0) as other:
        headers = await other.say("c", "hi")
        for _ in range(6):
            await asyncio.sleep(0.8)
            await one.say("c", "hi")
        assert "running" == (await one.rollout(headers)).status
        await other.end("c")
        await one.say("c", "too late")
        assert [*[""] * 7, "late"] == [call.reject for call in (await one.episode(headers)).transitions]


async def test_running_conversation_counts_in_the_report_of_its_arm_as_an_ended_one_does(tmp_path, backend):
    store = SQLiteStore(f"sqlite:///{tmp_path}/served.db")
    await store.publish([ResourceVersion(name="main_llm", version=v, resource=Weights(uri=v)) for v in ("w1", "w2")])
    await labels.move(store, "main_llm", "production", "w1")
    await labels.move(store, "main_llm", "candidate", "w2")
    async with serve(tmp_path, backend, split="production=0.5,candidate=0.5") as talk:
        for index in range(8):
            headers = await talk.say(f"c{index}", "hi")
            await talk.rate(headers, index / 10)
            assert headers["x-agl-arm"] in ("production", "candidate")
        running = (
            await split_report(store, await pins_of(store, ["production", "candidate"])),
            await arms(store, "main_llm", ("w1", "w2"), experiment=None),
        )
        for index in range(8):
            await talk.end(f"c{index}")
        ended = (
            await split_report(store, await pins_of(store, ["production", "candidate"])),
            await arms(store, "main_llm", ("w1", "w2"), experiment=None),
        )
    assert running[0] == ended[0]
    assert [arm.units for arm in running[1]] == [arm.units for arm in ended[1]]
    assert 8 == sum(arm.rollouts for arm in running[0].arms) == sum(len(arm.rewards) for arm in running[1])
    await store.close()


async def test_ending_needs_a_conversation_that_began_and_a_token_that_may(tmp_path, backend):
    async with serve(tmp_path, backend) as talk:
        headers = await talk.say("c", "hi")
        said = [
            await talk.post("/conversations/end", "never", {}, status=404),
            await talk.post("/conversations/end", "", {}, status=400),
            await talk.post("/conversations/end", "c", {}, key="somebody-elses-token", status=401),
        ]
        token = AttemptTokens(SECRET).issue("ro", "ro.1", expires_at=time.time() + 60)
        said.append(await talk.post("/conversations/end", "c", {}, key=token, status=403))
        for part, (answer, _) in zip(
            ("'never'", "x-agl-conversation-id", "token", "AGL_CLIENT_TOKEN"), said, strict=True
        ):
            assert part in answer["error"]["message"]
        assert "running" == (await talk.rollout(headers)).status


async def test_client_rates_its_conversations_and_no_other_rollout(tmp_path, backend):
    async with serve(tmp_path, backend) as talk:
        headers = await talk.say("c", "hi")
        for rating in ({"value": 0.0}, {"value": 0.5, "feedback": "slow"}):
            answer, _ = await talk.post("/conversations/rate", "c", rating)
            assert {"rollout_id": headers["x-agl-rollout-id"], "status": "rated"} == answer
        await talk.end("c")
        assert 0.5 == (await talk.episode(headers)).reward
        await talk.post("/conversations/rate", "c", {"value": 1.0}, key=ADMIN)
        assert 1.0 == (await talk.episode(headers)).reward
        await talk.store.enqueue([Rollout(rollout_id="ro", task={}, experiment="e", group_id="ro")])
        for conversation, status, part in (("ro", 404, "'ro' has no calls"), ("", 400, "x-agl-conversation-id")):
            answer, _ = await talk.post("/conversations/rate", conversation, {"value": 1.0}, status=status)
            assert part in answer["error"]["message"]
        answer, _ = await talk.post("/conversations/rate", "c", {"score": 1.0}, status=400)
        assert '{"value": 1.0, "feedback": "why"}' in answer["error"]["message"]


async def test_without_a_client_token_and_a_split_nobody_converses(tmp_path, backend):
    async with serve(tmp_path, backend, client_key="") as talk:
        answer, _ = await talk.post("/v1/chat/completions", "c", {"model": "main_llm"}, key=ADMIN, status=401)
        assert "AGL_CLIENT_TOKEN" in answer["error"]["message"]


@pytest.fixture
def start(tmp_path: Path, backend: ScriptedModelServer) -> Iterator[Callable[[int], "subprocess.Popen[str]"]]:
    """Return a function that starts `agl serve` on a port, with conversations that end after five idle seconds."""
    started: list[subprocess.Popen[str]] = []

    def make(port: int) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "agl", "serve", "--store", "sqlite:///served.db", "--port", str(port)]
        command += ["--upstream", f"main_llm={backend.base_url},model=scripted,trained=1", "--conversation-idle", "5s"]
        keys = {"AGL_TOKEN": ADMIN, "AGL_CLIENT_TOKEN": CLIENT, "AGL_SECRET": SECRET.decode()}
        environment = {**os.environ, **keys}
        started.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None
        assert "serving" in started[-1].stdout.readline()
        return started[-1]

    yield make
    for process in started:
        stop(process)


def stop(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


@pytest.mark.long
async def test_killed_gateway_goes_on_with_its_conversations(tmp_path, start):
    """The conversation stays one attempt, and ends as long after its last call as any other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    talk = Talk(url=f"http://127.0.0.1:{port}", store=SQLiteStore(f"sqlite:///{tmp_path}/served.db"))
    first = start(port)
    silent = await talk.say("silent", "hi")
    headers = await talk.say("c", "hi")
    stop(first)
    assert ["running"] * 2 == [(await talk.rollout(told)).status for told in (silent, headers)]
    start(port)
    said = 1
    while (await talk.rollout(silent)).status == "running":
        assert headers["x-agl-attempt-id"] == (await talk.say("c", "hi", "yes", "why?"))["x-agl-attempt-id"]
        said += 1
        await asyncio.sleep(0.5)
    assert ("succeeded", "running") == ((await talk.rollout(silent)).status, (await talk.rollout(headers)).status)
    await talk.rate(headers, 1.0)
    await talk.until_ended(headers)
    episode = await talk.episode(headers)
    assert ([""] * said, 1.0) == ([call.reject for call in episode.transitions], episode.reward)
    await talk.store.close()


def test_idle_time_must_be_a_length_of_time(tmp_path, monkeypatch):
    monkeypatch.setenv("AGL_TOKEN", ADMIN)
    done = CliRunner().invoke(cli, ["serve", "--store", f"sqlite:///{tmp_path}/s.db", "--conversation-idle", "0"])
    assert (1, True) == (done.exit_code, "--conversation-idle must be above 0" in done.output), done.output


@pytest.mark.parametrize("body", [b"", b"{}"])
async def test_end_of_a_conversation_keeps_the_connection(tmp_path, backend, body):
    def end_twice(url: str) -> list[tuple[int, bool]]:
        connection = HTTPConnection(url.removeprefix("http://"))
        found: list[tuple[int, bool]] = []
        for _ in range(2):
            headers = {"authorization": f"Bearer {CLIENT}", "x-agl-conversation-id": "c"}
            connection.request("POST", "/conversations/end", body, headers)
            reply = connection.getresponse()
            reply.read()
            found.append((reply.status, connection.sock is not None))
        connection.close()
        return found

    async with serve(tmp_path, backend) as talk:
        await talk.say("c", "hi")
        assert [(200, True), (200, True)] == await asyncio.to_thread(end_twice, talk.url)
