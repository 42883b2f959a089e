"""A serving split over real sockets: shares, stickiness, routing, conversations, and the rewards of the arms."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from click.testing import CliRunner

from agl.contracts import RolloutQuery, Upstream
from agl.errors import ConfigError, StoreError, TokenError
from agl.schemas import (
    LLM,
    Outcome,
    PromptTemplate,
    ResourceVersion,
    Reward,
    Rollout,
    Span,
    Weights,
    new_rollout_id,
    new_span_id,
)
from agl_gateway.client import HttpStore
from agl_gateway.service import GatewayService
from agl_gateway.settings import Settings
from agl_gateway.traffic.splits import parse_split
from agl_inspect.records import labels as labels
from agl_inspect.records.splits import placement_of
from agl_inspect.terminal.program import cli
from agl_run.access.tokens import AttemptTokens
from agl_store_sqlite._store import SQLiteStore
from agl_testing.model_server import Reply, ScriptedModelServer
from agl_testing.waiting import eventually

ADMIN = "an-admin-token-of-the-tests"
CLIENT = "a-client-token-of-the-tests"
SECRET = b"a secret of the gateway's own tests"
HALVES = "production=0.5,candidate=0.5"


class Served:
    """One of several gateways on a database, with helpers for a client of it."""

    def __init__(self, service: GatewayService, url: str) -> None:
        self.store = service.store
        self.url = url
        self.http = HttpStore(url, token=ADMIN)

    async def open_attempt(self) -> tuple[Rollout, str]:
        """Enqueue and claim a rollout; returns it with the token of its attempt."""
        (queued,) = await self.http.enqueue([Rollout(rollout_id=new_rollout_id(), task={})])
        (claim,) = await self.http.claim(worker="test", lease_s=600)
        attempt = claim.attempt
        token = AttemptTokens(SECRET).issue(attempt.rollout_id, attempt.attempt_id, expires_at=time.time() + 600)
        assert queued.rollout_id == attempt.rollout_id
        return claim.rollout, token

    async def ask(
        self, token: str, *, conversation: str = "", text: str = "hi", extra: dict[str, str] | None = None, **more: Any
    ) -> tuple[str, Any]:
        """Make a call, with the headers in ``extra``; returns the answer's text and the response headers."""
        named = {"x-agl-conversation-id": conversation} if conversation else {}
        async with openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=token, max_retries=0) as client:
            reply = await client.chat.completions.with_raw_response.create(
                model="main_llm",
                messages=[{"role": "user", "content": text}],
                extra_headers={**named, **(extra or {})},
                **more,
            )
            return reply.parse().choices[0].message.content or "", reply.headers

    async def get(self, path: str, token: str, **headers: str) -> tuple[int, Any]:
        """Send a GET request; returns the status and the JSON body."""
        sent = {"authorization": f"Bearer {token}", **headers}
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}{path}", headers=sent) as reply:
            return reply.status, await reply.json()


@asynccontextmanager
async def serve(folder: Path, split: str | None = HALVES, upstreams: Sequence[Upstream] = ()) -> AsyncIterator[Served]:
    """Run a gateway on the folder's database, with a separate store object, as another process would have."""
    service = GatewayService(
        store=SQLiteStore(f"sqlite:///{folder}/served.db"),
        upstreams=upstreams,
        tokens=AttemptTokens(SECRET),
        settings=Settings(),
        admin_key=ADMIN,
        client_key=CLIENT,
        arms=True,
        split=parse_split(split) if split else None,
    )
    try:
        served = Served(service, await service.start())
        yield served
        await served.http.close()
    finally:
        await service.stop()
        await service.store.close()


async def publish(folder: Path, *versions: ResourceVersion, labelled: Sequence[str] = ()) -> None:
    """Publish versions, and give each of ``labelled`` to the first version of every name."""
    store = SQLiteStore(f"sqlite:///{folder}/served.db")
    await store.publish(versions)
    names = dict.fromkeys(version.name for version in versions)
    for name in names:
        own = [version.version for version in versions if version.name == name]
        for label, version in zip(labelled or ("production", "candidate"), own, strict=False):
            await labels.move(store, name, label, version)
    await store.close()


def prompts(*versions: str) -> list[ResourceVersion]:
    return [ResourceVersion(name="prompt", version=v, resource=PromptTemplate(template=f"{v}!")) for v in versions]


def models(**by_version: str) -> list[ResourceVersion]:
    return [ResourceVersion(name="main_llm", version=v, resource=LLM(model=m)) for v, m in by_version.items()]


@pytest.fixture
def servers():
    with ScriptedModelServer(default=Reply(text="old")) as old, ScriptedModelServer(default=Reply(text="new")) as new:
        yield old, new


def two(servers: tuple[ScriptedModelServer, ScriptedModelServer]) -> list[Upstream]:
    """Return one upstream for each of the policy's two versions."""
    old, new = servers
    return [
        Upstream(name="main_llm", base_url=old.base_url, model="scripted", model_version="w1"),
        Upstream(name="main_llm", base_url=new.base_url, model="scripted", model_version="w2"),
    ]


WEIGHTS = [ResourceVersion(name="main_llm", version=v, resource=Weights(uri=v)) for v in ("w1", "w2")]


async def test_thousand_rollouts_land_as_shared_and_stay_there(tmp_path):
    await publish(tmp_path, *prompts("v1", "v2", "v3"))
    rollouts = [Rollout(rollout_id=f"ro-{i:04d}", task=i) for i in range(1000)]
    async with serve(tmp_path, "production=0.9,candidate=0.1") as first:
        stored = await first.http.enqueue(rollouts)
        arms = Counter(rollout.resources["prompt"] for rollout in stored)
        assert 62 <= arms["v2"] <= 138  # four standard deviations
        assert 1000 == arms["v1"] + arms["v2"]
        async with serve(tmp_path, "production=0.9,candidate=0.1") as second:
            assert stored == await second.http.enqueue(rollouts)
    async with serve(tmp_path, "production=0.2,candidate=0.8") as restarted:
        await labels.move(restarted.store, "prompt", "candidate", "v3")
        assert stored == await restarted.http.enqueue(rollouts)
        (fresh,) = await restarted.http.enqueue([Rollout(rollout_id="ro-new-0", task=0)])
        placement = placement_of(fresh)
        assert placement is not None
        assert {"candidate": {"prompt": "v3"}, "production": {"prompt": "v1"}} == placement.versions


@pytest.mark.long
async def test_all_calls_of_a_rollout_go_to_one_arm_through_any_gateway(tmp_path, servers):
    await publish(tmp_path, *WEIGHTS)
    async with serve(tmp_path, HALVES, two(servers)) as one, serve(tmp_path, None, two(servers)) as other:
        seen: Counter[str] = Counter()
        for _ in range(12):
            rollout, token = await one.open_attempt()
            version = rollout.resources["main_llm"]
            said = [(await gateway.ask(token))[0] for gateway in (one, other, one)]
            assert [{"w1": "old", "w2": "new"}[version]] * 3 == said
            await one.http.spans(rollout.rollout_id, attempt_id=rollout.attempt_id)
            await other.http.spans(rollout.rollout_id, attempt_id=rollout.attempt_id)
            spans = await one.http.spans(rollout.rollout_id)
            assert [("main_llm", version)] * 3 == [(s.call.policy, s.call.model_version) for s in spans if s.call]
            arm = {"w1": "production", "w2": "candidate"}[version]
            assert [arm] * 3 == [span.attributes["agl.split.arm"] for span in spans]
            await one.http.finish([Outcome(attempt_id=str(rollout.attempt_id), status="succeeded")])
            seen[version] += 1
        assert {"w1", "w2"} == set(seen)


async def test_arms_may_be_two_models_of_one_backend(tmp_path, servers):
    await publish(tmp_path, *models(m1="small", m2="large"))
    backend = Upstream(name="main_llm", base_url=servers[0].base_url, model="whatever")
    async with serve(tmp_path, HALVES, [backend]) as gateway:
        asked = {}
        for index in range(8):
            _, headers = await gateway.ask(CLIENT, conversation=f"c{index}")
            asked[f"c{index}"] = (headers["x-agl-arm"], servers[0].calls[-1].json["model"])
        assert {("production", "small"), ("candidate", "large")} == set(asked.values())


@pytest.mark.long
async def test_conversation_keeps_its_arm_through_restart_and_gateways(tmp_path, servers):
    await publish(tmp_path, *WEIGHTS)
    names = [f"c{i}" for i in range(10)]
    async with serve(tmp_path, HALVES, two(servers)) as one, serve(tmp_path, HALVES, two(servers)) as other:
        both = [gateway.ask(CLIENT, conversation=name) for name in names for gateway in (one, other)]
        found = await asyncio.gather(*both)
    arms = {}
    for name, (text, headers) in zip([name for name in names for _ in range(2)], found, strict=True):
        arm = (headers["x-agl-arm"], headers["x-agl-rollout-id"], headers["x-agl-attempt-id"], text)
        assert arm == arms.setdefault(name, arm)
    assert {("production", "old"), ("candidate", "new")} == {(arm[0], arm[3]) for arm in arms.values()}
    async with serve(tmp_path, "production=0.1,candidate=0.9", two(servers)) as restarted:
        for name in names:
            text, headers = await restarted.ask(CLIENT, conversation=name)
            assert arms[name][:2] == (headers["x-agl-arm"], headers["x-agl-rollout-id"])
            rollout_id = headers["x-agl-rollout-id"]
            calls = [span for span in await restarted.store.spans(rollout_id) if span.call]
            assert (3, text) == (len(calls), arms[name][3])
            (rollout,) = await restarted.store.rollouts(RolloutQuery(ids=(rollout_id,)))
            assert ("running", name) == (rollout.status, rollout.metadata["conversation"])


async def test_conversation_is_told_by_header_then_metadata_then_its_opening(tmp_path, servers):
    await publish(tmp_path, *WEIGHTS)
    async with serve(tmp_path, HALVES, two(servers)) as gateway:

        async def rollout_of(**said: Any) -> str:
            return (await gateway.ask(CLIENT, **said))[1]["x-agl-rollout-id"]

        by_header = await rollout_of(conversation="c1", text="a")
        assert by_header == await rollout_of(conversation="c1", text="b", metadata={"conversation_id": "c2"})
        assert by_header == await rollout_of(text="c", metadata={"conversation_id": "c1"})
        by_opening = await rollout_of(text="a")
        assert by_opening == await rollout_of(text="a", temperature=0.5)
        assert 3 == len({by_header, by_opening, await rollout_of(text="b")})
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=CLIENT, max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match="x-agl-conversation-id"):
                await client.completions.create(model="main_llm", prompt="a")
            turns: Any = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
            later = await client.chat.completions.with_raw_response.create(model="main_llm", messages=turns)
            assert by_opening == later.headers["x-agl-rollout-id"]
            named = await client.responses.with_raw_response.create(model="main_llm", input="a", instructions="Be.")
            with pytest.raises(openai.BadRequestError, match="names no conversation"):
                await client.responses.create(model="main_llm", input="a", previous_response_id="resp_1")
            assert named.headers["x-agl-rollout-id"] not in (by_header, by_opening)


async def test_streamed_answer_of_a_conversation_is_in_the_store_when_it_ends(tmp_path, servers):
    await publish(tmp_path, *WEIGHTS)
    async with (
        serve(tmp_path, HALVES, two(servers)) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=CLIENT, max_retries=0) as client,
    ):
        reply = await client.chat.completions.with_raw_response.create(
            model="main_llm",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            extra_headers={"x-agl-conversation-id": "s"},
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in reply.parse() if chunk.choices])
        assert {"production": "old", "candidate": "new"}[reply.headers["x-agl-arm"]] == text


async def test_client_token_may_converse_and_nothing_else(tmp_path, servers):
    await publish(tmp_path, *WEIGHTS)
    async with serve(tmp_path, HALVES, two(servers)) as gateway:
        _, headers = await gateway.ask(CLIENT, conversation="c")
        store = HttpStore(gateway.url, token=CLIENT)
        with pytest.raises(TokenError, match="admin token"):
            await store.cursor()
        span = Span(
            rollout_id=headers["x-agl-rollout-id"],
            attempt_id=headers["x-agl-attempt-id"],
            span_id=new_span_id(),
            name="r",
        )
        with pytest.raises(TokenError, match="admin token"):
            await store.append_spans([span])
        await store.close()
        assert 403 == (await gateway.get("/split", CLIENT))[0]


async def test_caller_gets_the_prompt_of_its_arm(tmp_path):
    await publish(tmp_path, *prompts("v1", "v2"))
    async with serve(tmp_path) as gateway:
        for index in range(6):
            status, found = await gateway.get(
                "/split/resources/prompt", CLIENT, **{"x-agl-conversation-id": f"c{index}"}
            )
            arm = parse_split(HALVES).arm_of(f"c{index}")
            assert (200, {"production": "v1!", "candidate": "v2!"}[arm]) == (status, found["resource"]["template"])
        rollout, token = await gateway.open_attempt()
        status, found = await gateway.get("/split/resources/prompt", token)
        assert (200, rollout.resources["prompt"]) == (status, found["version"])
        status, found = await gateway.get("/split/resources/tools", token)
        assert (404, True) == (status, "has no version of 'tools'" in found["error"]["message"])
        assert 400 == (await gateway.get("/split/resources/prompt", CLIENT))[0]


async def test_rollout_that_was_removed_is_not_found(tmp_path):
    await publish(tmp_path, *prompts("v1", "v2"))
    async with serve(tmp_path) as gateway:
        rollout, token = await gateway.open_attempt()
        await gateway.store.finish([Outcome(attempt_id=f"{rollout.rollout_id}.1", status="succeeded")])
        await gateway.store.delete([rollout.rollout_id])
        status, found = await gateway.get("/split/resources/prompt", token)
    assert 404 == status
    assert f"unknown rollout {rollout.rollout_id!r}" in found["error"]["message"]


@pytest.mark.long
async def test_report_of_rewards_agrees_with_a_calculation_by_hand(tmp_path, servers):
    await publish(tmp_path, *WEIGHTS)
    given: dict[str, list[float]] = {"production": [], "candidate": []}
    async with serve(tmp_path, HALVES, two(servers)) as gateway:
        for index in range(24):
            _, headers = await gateway.ask(CLIENT, conversation=f"c{index}")
            arm = headers["x-agl-arm"]
            value = {"production": 0.4, "candidate": 0.6}[arm] + (0.1 if index % 2 else -0.1)
            given[arm].append(value)
            span = Span(
                rollout_id=headers["x-agl-rollout-id"],
                attempt_id=headers["x-agl-attempt-id"],
                span_id=new_span_id(),
                name="thumb",
                reward=Reward(value=value, source="human"),
            )
            await gateway.http.append_spans([span])
        await gateway.ask(CLIENT, conversation="unrated")
        status, report = await gateway.get("/split", ADMIN)
    assert 200 == status
    old, new = given["production"], given["candidate"]
    against = report["against"]["candidate"]
    assert sum(new) / len(new) - sum(old) / len(old) == pytest.approx(against["difference"], abs=0.1)
    assert against["low"] < against["difference"] < against["high"]
    assert [len(old), len(new)] == [arm["rollouts"] - arm["unrewarded"] for arm in report["arms"]]
    assert 1 == sum(arm["unrewarded"] for arm in report["arms"])


@pytest.mark.parametrize(
    ("versions", "labelled", "upstreams", "message"),
    [
        (prompts("v1"), (), (), "'candidate' names no version"),
        (prompts("v1"), ("candidate",), (), "'production' names no version"),
        (WEIGHTS, (), (), "no upstream serves main_llm@w1; start the gateway with --upstream main_llm=URL,version=w1"),
        (WEIGHTS, (), (("main_llm", "w1"),), "no upstream serves main_llm@w2"),
        (WEIGHTS, (), (("main_llm", "w1"), ("main_llm", "")), "two upstreams are named 'main_llm'"),
    ],
)
async def test_split_that_cannot_be_served_is_refused_at_the_start(tmp_path, versions, labelled, upstreams, message):
    await publish(tmp_path, *versions, labelled=labelled)
    given = [Upstream(name=name, base_url="http://127.0.0.1:9/v1", model_version=v) for name, v in upstreams]
    with pytest.raises(ConfigError, match=message):
        async with serve(tmp_path, HALVES, given):
            pass


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("production=0.9,candidate=0.2", "the shares add up to 1.1"),
        ("production=0.9", "two arms or more"),
        (HALVES, "'candidate' names no version"),
    ],
)
def test_bad_split_ends_the_command_with_its_reason(tmp_path, monkeypatch, split, message):
    monkeypatch.setenv("AGL_TOKEN", ADMIN)
    monkeypatch.setenv("AGL_SECRET", SECRET.decode())
    asyncio.run(publish(tmp_path, *prompts("v1")))
    url = f"sqlite:///{tmp_path}/served.db"
    done = CliRunner().invoke(cli, ["serve", "--store", url, "--port", "0", "--split", split])
    assert (1, True) == (done.exit_code, message in done.output), done.output


@pytest.mark.parametrize("name", ["AGL_TOKEN", "AGL_CLIENT_TOKEN"])
def test_short_token_is_refused_with_what_to_do(tmp_path, monkeypatch, name):
    monkeypatch.setenv("AGL_TOKEN", ADMIN)
    monkeypatch.setenv(name, "short")
    done = CliRunner().invoke(cli, ["serve", "--store", f"sqlite:///{tmp_path}/s.db", "--port", "0", "--split", HALVES])
    assert (1, True) == (done.exit_code, f"{name} has 5 bytes, at least 16 are needed" in done.output), done.output


async def test_label_that_moves_to_a_version_without_an_upstream_fails_its_own_arm_only(tmp_path, servers):
    third = ResourceVersion(name="main_llm", version="w3", resource=Weights(uri="w3"))
    await publish(tmp_path, *WEIGHTS, third)
    async with serve(tmp_path, HALVES, two(servers)) as gateway:
        await labels.move(gateway.store, "main_llm", "candidate", "w3")
        arms = {f"c{i}": parse_split(HALVES).arm_of(f"c{i}") for i in range(8)}
        for name, arm in arms.items():
            if arm == "production":
                assert "old" == (await gateway.ask(CLIENT, conversation=name))[0]
            else:
                with pytest.raises(openai.InternalServerError, match="no upstream serves main_llm@w3"):
                    await gateway.ask(CLIENT, conversation=name)


async def test_conversation_whose_record_was_removed_is_opened_again(tmp_path, servers):
    await publish(tmp_path, *WEIGHTS)
    async with serve(tmp_path, HALVES, two(servers)) as gateway:
        name = next(f"c{i}" for i in range(20) if parse_split(HALVES).arm_of(f"c{i}") == "candidate")
        text, headers = await gateway.ask(CLIENT, conversation=name)
        rollout_id = headers["x-agl-rollout-id"]
        await gateway.store.finish([Outcome(attempt_id=headers["x-agl-attempt-id"], status="succeeded")])
        await gateway.store.delete([rollout_id])
        await labels.move(gateway.store, "main_llm", "candidate", "w1")
        assert ["new", "new", "old"] == [text, *[(await gateway.ask(CLIENT, conversation=name))[0] for _ in range(2)]]
        assert 1 == len([span for span in await gateway.store.spans(rollout_id) if span.call])


class Process:
    """Runs `agl serve --split` as a process that a test can kill."""

    def __init__(self, folder: Path, backend: str) -> None:
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._options = ["--split", HALVES, "--upstream", f"main_llm={backend},model=scripted"]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "agl", "serve", "--store", "sqlite:///served.db", "--port", str(self.port)]
        keys = {"AGL_TOKEN": ADMIN, "AGL_CLIENT_TOKEN": CLIENT, "AGL_SECRET": SECRET.decode()}
        process = subprocess.Popen(
            [*command, *self._options], cwd=self._folder, env={**os.environ, **keys}, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert "serving" in process.stdout.readline()
        return process


class Traffic:
    """Clients that keep queueing rollouts and making conversation calls, whatever happens to the server.

    They record the answers that they get.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.placed: dict[str, str] = {}
        self.answered: Counter[str] = Counter()
        self.is_over = False

    async def queue(self, name: str) -> None:
        store = HttpStore(self._url, token=ADMIN)
        while not self.is_over:
            try:
                (stored,) = await store.enqueue([Rollout(rollout_id=f"ro-{name}-{len(self.placed)}", task=0)])
            except StoreError:
                continue  # it was down for longer than the client waits
            self.placed[stored.rollout_id] = stored.resources["prompt"]
        await store.close()

    async def talk(self, name: str) -> None:
        turn = 0
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {CLIENT}"}) as session:
            while not self.is_over:
                turn += 1
                try:
                    await self._say(session, f"c-{name}-{turn // 2}", str(turn))
                except (aiohttp.ClientError, ConnectionError):
                    await asyncio.sleep(0.05)

    async def _say(self, session: aiohttp.ClientSession, conversation: str, text: str) -> None:
        body = {"model": "main_llm", "messages": [{"role": "user", "content": text}]}
        url = f"{self._url}/v1/chat/completions"
        async with session.post(url, json=body, headers={"x-agl-conversation-id": conversation}) as reply:
            if reply.status == 200 and await reply.read():
                self.answered[reply.headers["x-agl-rollout-id"]] += 1

    async def more(self) -> None:
        """Wait until rollouts and conversations have each had ten more answers."""
        placed, answered = len(self.placed), self.answered.total()
        await eventually(lambda: len(self.placed) >= placed + 10 and self.answered.total() >= answered + 10)


@pytest.mark.long
async def test_killed_gateway_loses_no_placement_and_no_call(tmp_path, servers):
    await publish(tmp_path, *prompts("v1", "v2"))
    served = Process(tmp_path, servers[0].base_url)
    process = served.start()
    traffic = Traffic(served.url)
    work = [asyncio.create_task(task) for name in "ab" for task in (traffic.queue(name), traffic.talk(name))]
    for _ in range(2):
        await traffic.more()
        process.kill()
        process.communicate()
        process = await asyncio.to_thread(served.start)
    traffic.is_over = True
    await asyncio.gather(*work)
    store = HttpStore(served.url, token=ADMIN)
    for rollout_id, version in traffic.placed.items():
        (rollout,) = await store.rollouts(RolloutQuery(ids=(rollout_id,)))
        assert version == rollout.resources["prompt"]
    for rollout_id, count in traffic.answered.items():
        (rollout,) = await store.rollouts(RolloutQuery(ids=(rollout_id,)))
        calls = [span for span in await store.spans(rollout_id) if span.call is not None]
        assert ("running", True) == (rollout.status, len(calls) >= count)
        assert not any(span.is_late for span in calls)
    await store.close()
    process.kill()
    process.communicate()
