"""A policy with several servers: the server that a rollout's calls go to, and the failure of a server."""

import asyncio
import json
import random
from collections import Counter

import aiohttp
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl.contracts import Upstream
from agl.errors import ConfigError
from agl_gateway.relay.routing import Replicas, Router
from agl_testing.model_server import Cut, Reply, ScriptedModelServer, Status

MESSAGES = [{"role": "user", "content": "hi"}]
SERVERS = st.lists(st.sampled_from([f"http://{name}/v1" for name in "abcdef"]), min_size=1, unique=True)


async def ask(it, token, **settings):
    async with it.openai(token) as client:
        answer = await client.chat.completions.create(model="main_llm", messages=MESSAGES, **settings)
        return [chunk async for chunk in answer] if settings.get("stream") else answer


@pytest.fixture
def others():
    with ScriptedModelServer(default=Reply(text="second")) as a, ScriptedModelServer(default=Reply(text="third")) as b:
        yield [a, b]


def spread(server, others):
    base_urls = [other.base_url for other in others]
    return Upstream(
        name="main_llm", base_url=server.base_url, model="scripted", is_trained=True, replicas=tuple(base_urls)
    )


def serving(servers, rollout_id):
    """Return the server to which a rollout's calls go."""
    by_url = {server.base_url: server for server in servers}
    return by_url[Replicas(list(by_url)).ranked(rollout_id)[0]]


@given(SERVERS, st.text())
def test_a_rollout_keeps_its_server_and_only_a_dead_servers_rollouts_move(servers, rollout_id):
    order = Replicas(servers).ranked(rollout_id)
    assert sorted(servers) == sorted(order)
    assert order == Replicas(servers[::-1]).ranked(rollout_id)
    for gone in servers[1:]:
        rest = [base_url for base_url in order if base_url != gone]
        assert rest == Replicas([base_url for base_url in servers if base_url != gone]).ranked(rollout_id)


def test_rollouts_are_spread_evenly():
    replicas = Replicas([f"http://127.0.0.1:{port}/v1" for port in range(8000, 8004)])
    firsts = [replicas.ranked(f"ro-{number}")[0] for number in range(4000)]
    assert all(850 < firsts.count(base_url) < 1150 for base_url in set(firsts))


def test_a_server_that_failed_is_asked_last_for_a_while():
    now = [100.0]
    replicas = Replicas(["http://a/v1", "http://b/v1", "http://c/v1"], clock=lambda: now[0])
    first, *rest = replicas.ranked("ro-1")
    replicas.load.failed(first)
    assert [*rest, first] == replicas.ranked("ro-1")
    now[0] += 5.0
    assert [first, *rest] == replicas.ranked("ro-1")


@pytest.mark.parametrize("at_once", [1, 8, 64, 512])
def test_rollouts_share_the_servers_evenly_and_keep_theirs(at_once):
    urls = [f"http://host{number}/v1" for number in range(8)]
    replicas, draw = Replicas(urls), random.Random(0)
    tasks = [(f"ro-{number}", draw.randint(1, 6)) for number in range(1024)]
    calls, kept, running, now = Counter(), 0, [], 0.0

    def begin(rollout_id, turns):
        url = replicas.ranked(rollout_id)[0]
        calls[url] += 1
        replicas.load.in_flight[url] += 1
        running.append((now + draw.expovariate(1.0), rollout_id, turns, url))

    while tasks or running:
        while tasks and len(running) < at_once:
            begin(*tasks.pop())
        running.sort(key=lambda call: -call[0])
        now, rollout_id, turns, url = running.pop()
        replicas.load.in_flight[url] -= 1
        if turns > 1:
            begin(rollout_id, turns - 1)
            kept += running[-1][3] == url
    assert max(calls.values()) <= 1.3 * calls.total() / len(urls)
    assert kept >= 0.8 * (calls.total() - 1024)


def test_a_slow_servers_rollouts_go_to_their_next_server_until_it_has_caught_up():
    replicas = Replicas(["http://a/v1", "http://b/v1", "http://c/v1"])
    first, second, third = replicas.ranked("ro-1")
    for _ in range(4):
        assert first == replicas.ranked("ro-1")[0]
        replicas.load.in_flight[first] += 1
    assert [second, third, first] == replicas.ranked("ro-1")
    replicas.load.failed(second)
    assert [third, first, second] == replicas.ranked("ro-1")
    for _ in range(4):
        replicas.load.in_flight[first] -= 1
    assert [first, third, second] == replicas.ranked("ro-1")


def test_a_replica_without_http_is_refused():
    with pytest.raises(ConfigError, match=r"'main_llm': base_url '127.0.0.1:8001' is not a URL"):
        Router([Upstream(name="main_llm", base_url="http://127.0.0.1:8000/v1", replicas=("127.0.0.1:8001",))])


async def test_all_calls_of_a_rollout_go_to_one_server(stage, server, others):
    async with stage(upstreams=[spread(server, others)]) as it:
        for _ in range(6):
            attempt_id, token = await it.open_attempt()
            chosen = serving([server, *others], attempt_id.rpartition(".")[0])
            before = len(chosen.calls)
            for _ in range(3):
                await ask(it, token)
            assert before + 3 == len(chosen.calls)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["plain", "streamed"])
async def test_calls_of_a_dead_server_are_served_elsewhere_and_recorded_once(stage, server, others, is_streamed):
    async with stage(upstreams=[spread(server, others)]) as it:
        attempt_id, token = await it.open_attempt()
        await ask(it, token)
        serving([server, *others], attempt_id.rpartition(".")[0]).stop()
        assert all(await asyncio.gather(*(ask(it, token, stream=is_streamed) for _ in range(8))))
        calls = await it.calls(attempt_id)
        assert 9 == len(calls) == len({call.request_id for call in calls})
        assert {200} == {call.status_code for call in calls}
        assert all(call.response_ids and not call.ids_missing for call in calls)
        assert 1 <= await rerouted(it) <= 8


async def test_a_server_that_dies_in_the_middle_of_its_answer_is_replaced(stage, server, others):
    servers = [server, *others]
    async with stage(upstreams=[spread(server, others)]) as it:
        attempt_id, token = await it.open_attempt()
        serving(servers, attempt_id.rpartition(".")[0]).enqueue(Cut(after_chunks=0))
        assert (await ask(it, token)).choices[0].message.content
        (call,) = await it.calls(attempt_id)
        assert (200, "") == (call.status_code, call.error)
        assert 2 == sum(len(one.calls) for one in servers)
        assert 1 == await rerouted(it)


async def test_an_error_that_a_living_server_answers_is_not_asked_again(stage, server, others):
    servers = [server, *others]
    async with stage(upstreams=[spread(server, others)]) as it:
        attempt_id, token = await it.open_attempt()
        serving(servers, attempt_id.rpartition(".")[0]).enqueue(Status(code=500))
        with pytest.raises(openai.InternalServerError):
            await ask(it, token)
        assert 1 == sum(len(one.calls) for one in servers)
        assert 0 == await rerouted(it)


async def test_no_server_left_is_one_recorded_502(stage, server, others):
    async with stage(upstreams=[spread(server, others)]) as it:
        attempt_id, token = await it.open_attempt()
        for one in (server, *others):
            one.stop()
        with pytest.raises(openai.InternalServerError, match="cannot be reached"):
            await ask(it, token)
        (call,) = await it.calls(attempt_id)
        assert 502 == call.status_code


async def test_resume_names_the_model_that_the_backend_is_asked_for(stage):
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        await it.gateway.pause("main_llm")
        await it.gateway.resume("main_llm", model_version="v1", model="main_llm-lora")
        await ask(it, token)
        await it.gateway.resume("main_llm")
        await ask(it, token)
        assert ["main_llm-lora"] * 2 == [json.loads(call.body)["model"] for call in it.server.calls]
        assert ["v1", "v1"] == [call.model_version for call in await it.calls(attempt_id)]


async def test_sglang_gives_ids_in_its_own_fields_and_refuses_streams_with_them(stage, server):
    server._handler._flavour = "sglang"
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        await ask(it, token)
        with pytest.raises(openai.BadRequestError):
            await ask(it, token, stream=True)
        plain, streamed = await it.calls(attempt_id)
        assert plain.response_len
        assert not plain.ids_missing
        assert "no answer: HTTP 400" in streamed.ids_missing


async def rerouted(it) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{it.url}/metrics") as reply:
        text = await reply.text()
    (line,) = [line for line in text.splitlines() if line.startswith("agl_calls_rerouted_total{")]
    return int(float(line.split()[1]))
