"""The policy `verl`: calls reach VERL's replicas while there are any, and a policy in this process otherwise."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

from agl.errors import ConfigError, PolicyError
from agl.schemas import LLM, ResourceVersion, Weights
from agl_algo_verl.serving.policy import VerlPolicy
from agl_algo_verl.serving.relay import with_version
from agl_testing.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path


class Replica:
    """A small server that reports its name and counts conversations."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.keys: list[str] = []
        self.bodies: list[bytes] = []
        self.address = ""
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.read())
        body = await request.json()
        self.keys.append(request.headers.get("authorization", ""))
        self.seen[json.dumps(body["messages"][0])] += 1
        if body.get("stream"):
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            for part in body.get("parts", ("data: 1\n\n", "data: [DONE]\n\n")):
                await response.write(part.encode())
                await asyncio.sleep(0)
            return response
        await self.goes_on.wait()
        return web.json_response({"model": body["model"], "address": self.address})


@asynccontextmanager
async def replicas(count: int) -> AsyncGenerator[tuple[list[Replica], list[web.AppRunner]]]:
    """Run replicas; yields them, and the runner with which each can be stopped."""
    found, runners = [Replica() for _ in range(count)], list[web.AppRunner]()
    for replica in found:
        app = web.Application()
        app.router.add_get("/v1/models", models)
        app.router.add_post("/v1/chat/completions", replica.answer)
        runners.append(web.AppRunner(app))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
        replica.address = f"127.0.0.1:{runners[-1].addresses[0][1]}"
    try:
        yield found, runners
    finally:
        for runner in runners:
            await runner.cleanup()


@asynccontextmanager
async def dying(head: str) -> AsyncGenerator[str]:
    """Yield the address of a server that dies right after the head of its first answer to a call."""
    model = b'{"data": [{"id": "inside"}]}'

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n" + model)
        else:
            server.close()
            writer.write(f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@asynccontextmanager
async def serving(**params: Any) -> AsyncGenerator[tuple[VerlPolicy, LLM]]:
    policy = VerlPolicy(name="llm", **params)
    try:
        yield policy, (await policy.start()).llm
    finally:
        await policy.stop()


async def models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "inside"}]})


async def call(llm: LLM, text: str, **fields: Any) -> Any:
    body = {"model": "llm", "messages": [{"role": "user", "content": text}], **fields}
    url = f"{llm.endpoint}/chat/completions"
    headers = {"authorization": f"Bearer {os.environ[llm.api_key_env]}"}
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as reply:
        return await (reply.text() if fields.get("stream") else reply.json())


def test_a_conversation_stays_on_one_replica_and_all_are_used() -> None:
    async def body() -> None:
        async with replicas(2) as (found, _), serving(model="m") as (policy, llm):
            await policy.attach([r.address for r in found])
            for number in range(16):
                answers = [await call(llm, f"task {number}") for _ in range(2)]
                assert answers[0] == answers[1]
                assert "inside" == answers[0]["model"]
            assert all(replica.seen for replica in found)
            assert {"replica_calls": 32, "replica_failures": 0, "relay_restarts": 0} == await policy.counts()

    asyncio.run(body())


def test_tasks_with_a_common_opening_are_spread_evenly_and_keep_their_replica() -> None:
    common = [{"role": "system", "content": "You answer."}, {"role": "user", "content": "An example: 1"}]

    async def body() -> None:
        async with replicas(4) as (found, _), serving(model="m") as (policy, llm):
            await policy.attach([r.address for r in found])
            places, slots = list[set[str]](), asyncio.Semaphore(32)

            async def converse(task: int) -> None:
                async with slots:
                    messages, met = [*common, {"role": "user", "content": f"task {task}"}], set[str]()
                    for turn in range(3):
                        answer = await call(llm, "", messages=messages)
                        met.add(answer["address"])
                        messages += [{"role": "assistant", "content": f"{turn}"}, {"role": "user", "content": "go on"}]
                    places.append(met)

            await asyncio.gather(*(converse(task) for task in range(128)))
            counts = [sum(replica.seen.values()) for replica in found]
            assert max(counts) <= 1.3 * sum(counts) / len(counts)
            assert 64 <= sum(len(met) == 1 for met in places)  # by chance it would be eight

    asyncio.run(body())


def test_a_body_is_passed_on_as_it_came_but_for_the_models_name() -> None:
    sent = b'{"messages" : [ {"role": "user", "content": "\\u00e9 \xc3\xa9", "n": 1.10} ], "model": "llm", "top_p":1e0}'

    async def body() -> None:
        async with replicas(1) as (found, _), serving(model="m") as (policy, llm):
            await policy.attach([found[0].address])
            headers = {"authorization": f"Bearer {os.environ[llm.api_key_env]}"}
            url = f"{llm.endpoint}/chat/completions"
            async with aiohttp.ClientSession(headers=headers) as session:
                for named in (sent, sent.replace(b'"llm"', b'"inside"')):
                    async with session.post(url, data=named) as reply:
                        assert reply.status == 200
            changed, same = found[0].bodies
            assert same == sent.replace(b'"llm"', b'"inside"')
            assert json.loads(changed) == json.loads(same)
            assert b'[ {"role": "user", "content": "\\u00e9' in changed

    asyncio.run(body())


def test_a_body_that_is_nested_too_deep_is_passed_on_as_it_came() -> None:
    sent = b'{"model": "llm", "messages": [{"content": "hi"}], "tools": ' + b"[" * 5000 + b"]" * 5000 + b"}"

    async def body() -> None:
        async with replicas(1) as (found, _), serving(model="m") as (policy, llm):
            await policy.attach([found[0].address])
            headers = {"authorization": f"Bearer {os.environ[llm.api_key_env]}"}
            url = f"{llm.endpoint}/chat/completions"
            async with aiohttp.ClientSession(headers=headers) as session, session.post(url, data=sent) as reply:
                await reply.read()
            assert [sent] == found[0].bodies

    asyncio.run(body())


def test_relay_and_replicas_are_asked_with_the_policies_key() -> None:
    async def body() -> None:
        async with replicas(1) as (found, _), serving(model="m") as (policy, llm):
            await policy.attach([found[0].address])
            await call(llm, "hi")
            assert [f"Bearer {os.environ['AGL_POLICY_KEY']}"] == found[0].keys
            async with aiohttp.ClientSession() as session, session.post(f"{llm.endpoint}/chat/completions") as reply:
                assert (401, True) == (reply.status, "AGL_POLICY_KEY" in await reply.text())
            assert 1 == len(found[0].keys)

    asyncio.run(body())


def test_streams_are_passed_on() -> None:
    async def body() -> None:
        async with replicas(1) as (found, _), serving(model="m") as (policy, llm):
            await policy.attach([found[0].address])
            assert "data: 1\n\ndata: [DONE]\n\n" == await call(llm, "hi", stream=True)

    asyncio.run(body())


def test_answers_say_which_weights_gave_them_unless_the_replica_says_it() -> None:
    parts = ['data: {"id"', ': 1}\n\ndata: {"id": 2}\n\n', "data: [DONE]\n\n"]

    async def body() -> None:
        async with replicas(1) as (found, _), serving(model="m") as (policy, llm):
            await policy.attach([found[0].address], version="global_step_4")
            assert "global_step_4" == (await call(llm, "hi"))["model_version"]
            events = (await call(llm, "hi", stream=True, parts=parts)).split("\n\n")
            assert {"id": 1, "model_version": "global_step_4"} == json.loads(events[0].removeprefix("data: "))
            assert ['data: {"id": 2}', "data: [DONE]", ""] == events[1:]

    asyncio.run(body())
    own = b'{"weight_versions": []}'
    assert (own, b"x", b"[1]") == (with_version(own, "v"), with_version(b"x", "v"), with_version(b"[1]", "v"))


def test_calls_are_held_while_weights_change_and_those_under_way_end_before() -> None:
    async def body() -> None:
        async with replicas(1) as (found, _), serving(model="m") as (policy, llm):
            await policy.attach([found[0].address], version="global_step_0")
            found[0].goes_on.clear()
            first = asyncio.create_task(call(llm, "one"))
            await eventually(lambda: found[0].seen)
            holding = asyncio.create_task(policy.hold())
            await asyncio.sleep(0.05)
            assert not holding.done()
            found[0].goes_on.set()
            assert "global_step_0" == (await first)["model_version"]
            await holding
            second = asyncio.create_task(call(llm, "two"))
            await asyncio.sleep(0.1)
            assert 1 == len(found[0].seen)
            await policy.attach([found[0].address], version="global_step_1")
            assert "global_step_1" == (await second)["model_version"]

    asyncio.run(body())


def test_a_call_whose_client_left_keeps_nobody_waiting() -> None:
    async def body() -> None:
        async with replicas(1) as (found, _), serving(model="m") as (policy, llm):
            await policy.attach([found[0].address])
            found[0].goes_on.clear()
            left = asyncio.create_task(call(llm, "one"))
            await eventually(lambda: found[0].seen)
            left.cancel()
            await asyncio.wait_for(policy.hold(), 10)
            found[0].goes_on.set()

    asyncio.run(body())


def test_a_directory_without_a_model_is_told_at_the_start_or_by_every_call(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing'.*no such directory"):
        VerlPolicy(name="llm", model=str(tmp_path / "nothing"))

    async def body() -> None:
        async with serving(model=str(tmp_path), home="absent") as (_, llm):
            answers = [await call(llm, "one") for _ in range(2)]
            assert ["nobody serves this model: "] * 2 == [answer["error"]["message"][:26] for answer in answers]

    asyncio.run(body())


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        policy = VerlPolicy(name="llm", model="m", port=taken.getsockname()[1])

        async def body() -> None:
            with pytest.raises(PolicyError, match=r"cannot listen on 127\.0\.0\.1:.*give another port"):
                await policy.start()
            await policy.stop()

        asyncio.run(body())


def test_calls_of_a_dead_replica_go_to_another_and_are_counted() -> None:
    async def body() -> None:
        async with replicas(2) as (found, runners), serving(model="m") as (policy, llm):
            await policy.attach([r.address for r in found])
            await runners[0].cleanup()
            answers = [await call(llm, f"task {number}") for number in range(12)]
            assert {found[1].address} == {answer["address"] for answer in answers}
            assert 12 == sum(found[1].seen.values())
            assert 0 < (await policy.counts())["replica_failures"] <= 12

    asyncio.run(body())


def test_calls_wait_for_other_replicas_where_all_are_dead() -> None:
    async def body() -> None:
        async with replicas(2) as (found, runners), serving(model="m") as (policy, llm):
            await policy.attach([found[0].address])
            await runners[0].cleanup()
            waiting = asyncio.create_task(call(llm, "task"))
            await asyncio.wait_for(policy.lost(), 30)
            await policy.detach()  # which starts nobody at home for an experiment that ends
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await policy.attach([found[1].address])
            assert found[1].address == (await waiting)["address"]

            await runners[1].cleanup()
            waiting = asyncio.create_task(call(llm, "task"))
            await asyncio.wait_for(policy.lost(), 30)
            await policy.stop()
            assert "stopped" in (await waiting)["error"]["message"]

    asyncio.run(body())


def test_without_replicas_a_policy_here_serves_the_newest_weights(model_dir: Path) -> None:
    pytest.importorskip("agl_algo_torch", reason="needs agl-algo-torch, which serves at home")

    async def body() -> None:
        async with replicas(1) as (found, _), serving(model=str(model_dir), threads=1) as (policy, llm):
            await policy.load(ResourceVersion(name="llm", version="sft-3", resource=Weights(uri=str(model_dir))))
            assert "sft-3" == (await call(llm, "hi", max_tokens=1))["model_version"]
            await policy.attach([found[0].address])
            assert found[0].address == (await call(llm, "hi"))["address"]
            new = ResourceVersion(name="llm", version="verl-1", resource=Weights(uri=str(model_dir)))
            served = await policy.load(new)
            await policy.detach()
            assert "verl-1" == (await call(llm, "hi", max_tokens=1))["model_version"] == served.version

    asyncio.run(body())


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(ConfigError, match="through itself"):
        VerlPolicy(name="llm", model="m", home="verl")

    async def body() -> None:
        async with serving(model="m", home="absent") as (policy, llm):
            with pytest.raises(ConfigError, match="can load weights"):
                await policy.load(
                    ResourceVersion(name="llm", version="1", resource=LLM(endpoint="http://x/v1", model="m"))
                )
            with pytest.raises(PolicyError, match="does not say which model"):
                await policy.attach(["127.0.0.1:1"])
            assert "absent" in (await call(llm, "hi"))["error"]["message"]

    asyncio.run(body())


HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("content-type: application/json\r\ncontent-length: 99", {}),
    "streamed": ("content-type: text/event-stream\r\ntransfer-encoding: chunked", {"stream": True}),
    "other protocol": ("\x15\x03 this is no header", {}),
}
"""For each kind of answer, its HTTP head and the request fields that ask for it."""


@pytest.mark.parametrize("version", ["", "global_step_1"])
@pytest.mark.parametrize(("head", "fields"), HEADS.values(), ids=HEADS)
def test_a_call_whose_replica_dies_behind_its_headers_goes_to_another(
    head: str, fields: dict[str, Any], version: str
) -> None:
    async def body() -> None:
        async with replicas(1) as (found, _), dying(head) as first, serving(model="m") as (policy, llm):
            await policy.attach([first, found[0].address], version=version)
            for number in range(4):
                answer = await call(llm, f"task {number}", **fields)
                assert "DONE" in answer if fields else found[0].address == answer["address"]
            assert (4, 1) == (sum(found[0].seen.values()), (await policy.counts())["replica_failures"])

    asyncio.run(body())


@pytest.mark.parametrize(("head", "fields"), HEADS.values(), ids=HEADS)
def test_a_call_waits_where_the_only_replica_dies_behind_its_headers(head: str, fields: dict[str, Any]) -> None:
    async def body() -> None:
        async with replicas(1) as (found, _), dying(head) as first, serving(model="m") as (policy, llm):
            await policy.attach([first])
            waiting = asyncio.create_task(call(llm, "task", **fields))
            await asyncio.wait_for(policy.lost(), 60)
            await policy.attach([found[0].address])
            answer = await waiting
            assert "DONE" in answer if fields else found[0].address == answer["address"]
            assert 1 == (await policy.counts())["replica_calls"]

    asyncio.run(body())
