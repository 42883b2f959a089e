"""A gateway for production traffic records a share of the conversations, and those with a good reward, each whole."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from click.testing import CliRunner

from agl.contracts import ExperimentRecord, RolloutQuery, Upstream
from agl.errors import ConfigError, NotFoundError
from agl.schemas import JsonResource, ResourceVersion, Reward, Span, new_span_id
from agl_gateway.service import GatewayService
from agl_gateway.settings import Settings, Share
from agl_gateway.traffic.conversations import rollout_id_of
from agl_gateway.traffic.kept_traffic import KeptTraffic, RewardSweep
from agl_gateway.traffic.splits import parse_split
from agl_inspect.records import labels as labels
from agl_inspect.records.shelf import run_key
from agl_inspect.records.splits import SERVED, ServedSplit
from agl_inspect.records.state import AlgorithmState
from agl_inspect.terminal.program import cli
from agl_run.access.tokens import AttemptTokens
from agl_store_sqlite._store import SQLiteStore
from agl_testing.model_server import Reply, ScriptedModelServer
from agl_testing.waiting import eventually

CLIENT = "a-client-token-of-the-tests"
HOUR = 3600.0


class Talk:
    """A client of a gateway, with a view of the gateway's store."""

    def __init__(self, url: str, store: SQLiteStore) -> None:
        self.url, self.store = url, store

    async def say(self, conversation: str, *, stream: bool = False) -> dict[str, str]:
        """Make a call and return the response headers; the answer's text is always the same."""
        body = {"model": "main_llm", "stream": stream, "messages": [{"role": "user", "content": "hi"}]}
        async with self._post("/v1/chat/completions", conversation, body) as reply:
            text = await reply.text()
            assert (200, True) == (reply.status, '"finish_reason":"stop"' in text.replace(" ", "")), text
            return dict(reply.headers)

    async def end(self, conversation: str) -> Any:
        return await self.ask("/conversations/end", conversation)

    async def ask(self, path: str, conversation: str) -> Any:
        async with self._post(path, conversation, {"value": 1.0}) as reply:
            assert 200 == reply.status
            return await reply.json()

    async def recorded(self) -> set[str]:
        return {str(one.metadata["conversation"]) for one in await self.store.rollouts(RolloutQuery())}

    async def rate(self, headers: dict[str, str], value: float) -> None:
        span = Span(
            rollout_id=headers["x-agl-rollout-id"],
            attempt_id=headers["x-agl-attempt-id"],
            span_id=new_span_id(),
            name="thumb",
            reward=Reward(value=value, source="human"),
        )
        await self.store.append_spans([span])

    async def metric(self, name: str) -> float:
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as reply:
            lines = (await reply.text()).splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))

    @asynccontextmanager
    async def _post(self, path: str, conversation: str, body: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {"authorization": f"Bearer {CLIENT}", "x-agl-conversation-id": conversation}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}{path}", json=body, headers=headers) as reply,
        ):
            yield reply


@pytest.fixture
def backend():
    with ScriptedModelServer(default=Reply(text="yes")) as server:
        yield server


@asynccontextmanager
async def serve(folder: Path, backend: ScriptedModelServer, share: Share, *, idle_s: float = HOUR):
    store = SQLiteStore(f"sqlite:///{folder}/served.db")
    service = GatewayService(
        store=store,
        upstreams=[Upstream(name="main_llm", base_url=backend.base_url, model="scripted")],
        tokens=AttemptTokens(b"a secret of the tests of what is kept"),
        settings=Settings(share=share, conversation_idle_s=idle_s),
        client_key=CLIENT,
        arms=True,
    )
    try:
        yield Talk(await service.start(), store)
    finally:
        await service.stop()
        await store.close()


def in_share(rate: float, count: int = 40) -> set[str]:
    share = Share(base_rate=rate)
    return {name for name in map("c{}".format, range(count)) if share.holds(rollout_id_of(name))}


async def test_same_share_of_conversations_is_recorded_by_every_gateway(tmp_path, backend):
    kept = in_share(0.3)
    assert 5 <= len(kept) <= 20
    for _ in range(2):  # each one new, on the same store
        async with serve(tmp_path, backend, Share(base_rate=0.3)) as talk:
            for name in map("c{}".format, range(40)):
                headers = await talk.say(name, stream=name.endswith("3"))
                assert headers.get("x-agl-not-recorded", "") == ("" if name in kept else "base_rate")
                assert ("x-agl-rollout-id" in headers) == (name in kept)
            assert kept == await talk.recorded()
            assert 40 - len(kept) == await talk.metric("agl_calls_not_recorded_total")


async def test_end_of_a_conversation_that_is_not_recorded_is_no_error(tmp_path, backend):
    async with serve(tmp_path, backend, Share(base_rate=0.0)) as talk:
        await talk.say("c")
        assert {"status": "not recorded"} == await talk.end("c")
        assert {"status": "not recorded"} == await talk.ask("/conversations/rate", "c")
        assert set() == await talk.recorded()


def test_shares_of_a_larger_rate_hold_those_of_a_smaller_one():
    assert set() == in_share(0.0) < in_share(0.2, 400) < in_share(0.6, 400) < in_share(1.0, 400)
    assert len(in_share(0.2, 4000)) == pytest.approx(800, abs=120)
    assert 400 == len(in_share(1.0, 400))


async def test_reward_keeps_a_conversation_outside_the_share(tmp_path, backend):
    share = Share(base_rate=0.3, reward_threshold=0.5, reward_wait_s=60.0)
    kept = in_share(0.3, 12)
    async with serve(tmp_path, backend, share) as talk:
        outside = sorted(set(map("c{}".format, range(12))) - kept)
        good, poor, unrated, running = outside[:4]
        rewards = {good: 0.5, poor: 0.4}
        for name in map("c{}".format, range(12)):
            headers = await talk.say(name)
            if name in rewards:
                await talk.rate(headers, rewards[name])
            if name != running:
                await talk.end(name)
        traffic = KeptTraffic(share, idle_s=HOUR)
        assert 0 == await RewardSweep(talk.store, traffic).remove()  # rewards may still arrive
        sweep = RewardSweep(talk.store, traffic, clock=lambda: time.time() + 61)
        assert 12 - len(kept) - 2 == await sweep.remove() == traffic.removed
        assert kept | {good, running} == await talk.recorded()
        assert 0 == await sweep.remove()
        await talk.end(running)
        assert 1 == await sweep.remove()
        assert unrated not in await talk.recorded()


async def test_two_gateways_remove_each_conversation_once(tmp_path, backend):
    share = Share(base_rate=0.0, reward_threshold=0.5, reward_wait_s=1.0)
    async with serve(tmp_path, backend, share) as one, serve(tmp_path, backend, share) as other:
        for number in range(20):
            talk = one if number % 2 else other
            await talk.say(f"c{number}")
            await talk.end(f"c{number}")

        async def counted() -> bool:
            removed = [await talk.metric("agl_conversations_removed_total") for talk in (one, other)]
            assert 20 >= sum(removed)
            return 20 == sum(removed)

        assert await eventually(counted)
        assert set() == await one.recorded()


async def test_conversations_that_an_algorithm_learns_from_stay(tmp_path, backend):
    share = Share(base_rate=0.0, reward_threshold=0.5, reward_wait_s=1.0)
    async with serve(tmp_path, backend, share) as talk:
        await talk.say("c")
        await talk.end("c")
        state = AlgorithmState(settings={"source": '["experiment:served-conversations"]'})
        learner = ExperimentRecord(name="learner", run=1, status="running")
        key = run_key("learner", 1, "algorithm/sft")
        await talk.store.save_state({key: msgspec.json.encode(state)}, experiment=learner)
        sweep = RewardSweep(talk.store, KeptTraffic(share, idle_s=HOUR), clock=lambda: time.time() + HOUR)
        assert 0 == await sweep.remove()
        assert {"c"} == await talk.recorded()


async def test_limit_per_minute_leaves_out_whole_conversations(tmp_path, backend):
    async with serve(tmp_path, backend, Share(max_spans_per_minute=3)) as talk:
        for name in ("a", "b", "c", "d", "e"):
            await talk.say(name)
        assert {"a", "b", "c"} == await talk.recorded()
        assert "x-agl-rollout-id" in await talk.say("b")  # goes on
        assert "max_spans_per_minute" == (await talk.say("d"))["x-agl-not-recorded"]
    async with serve(tmp_path, backend, Share(max_spans_per_minute=1)) as talk:  # knows of none of them
        await talk.say("f")
        assert "x-agl-rollout-id" in await talk.say("a")
        assert "max_spans_per_minute" == (await talk.say("g"))["x-agl-not-recorded"]


def test_conversation_that_was_left_out_stays_so_until_it_is_over():
    now = [0.0]
    traffic = KeptTraffic(Share(max_spans_per_minute=1), idle_s=100.0, clock=lambda: now[0])
    assert "" == traffic.left_out_by("one")
    traffic.count(is_recorded=True)
    assert "max_spans_per_minute" == traffic.left_out_by("two")
    now[0] = 90.0  # the minute is over, the conversation is not
    assert "max_spans_per_minute" == traffic.left_out_by("two")
    assert "" == traffic.left_out_by("three")
    now[0] = 191.0
    assert "" == traffic.left_out_by("two")


@pytest.mark.parametrize(
    "words",
    [("--base-rate", "2"), ("--max-spans-per-minute", "-1")],
)
def test_impossible_share_is_refused(tmp_path, words):
    done = CliRunner().invoke(cli, ["serve", "--store", f"sqlite:///{tmp_path}/s.db", "--port", "0", *words])
    assert 2 == done.exit_code
    assert words[0] in done.stderr


async def test_split_needs_all_conversations(tmp_path):
    store = SQLiteStore(f"sqlite:///{tmp_path}/s.db")
    service = GatewayService(
        store=store,
        upstreams=[],
        tokens=AttemptTokens(b"a secret of the tests of what is kept"),
        settings=Settings(share=Share(base_rate=0.5)),
        split=parse_split("production=0.5,candidate=0.5"),
    )
    await store.publish([ResourceVersion(name="prompt", version=v, resource=JsonResource(value=v)) for v in "ab"])
    for label, version in (("production", "a"), ("candidate", "b")):
        await labels.move(store, "prompt", label, version)
    with pytest.raises(ConfigError, match="none may be left out"):
        await service.start()
    await service.stop()
    await store.close()


async def test_all_conversations_are_recorded_while_a_learner_serves_a_split(tmp_path, backend, caplog):
    split = ServedSplit(shares={"production": 1.0}, versions={"production": {"prompt": "a"}})
    async with serve(tmp_path, backend, Share(base_rate=0.0)) as talk:
        assert "base_rate" == (await talk.say("a"))["x-agl-not-recorded"]
        await SERVED.add(talk.store, {"": split})
        for name in ("b", "c"):
            assert "production" == (await talk.say(name))["x-agl-arm"]
        assert {"b", "c"} == await talk.recorded()
    assert 1 == caplog.text.count("agl learn serves a split in this store, which needs all conversations")
    share = Share(base_rate=0.0, reward_threshold=0.5, reward_wait_s=1.0)
    async with serve(tmp_path, backend, share) as talk:  # starts although there is a split
        await talk.say("d")
        await talk.end("d")
        sweep = RewardSweep(talk.store, KeptTraffic(share, idle_s=HOUR), clock=lambda: time.time() + HOUR)
        assert 0 == await sweep.remove()


async def test_removed_conversation_takes_no_late_reward(tmp_path, backend):
    share = Share(base_rate=0.0, reward_threshold=0.5, reward_wait_s=1.0)
    async with serve(tmp_path, backend, share) as talk:
        headers = await talk.say("c")
        await talk.end("c")
        sweep = RewardSweep(talk.store, KeptTraffic(share, idle_s=HOUR), clock=lambda: time.time() + HOUR)
        assert 1 == await sweep.remove()
        with pytest.raises(NotFoundError):
            await talk.rate(headers, 1.0)
