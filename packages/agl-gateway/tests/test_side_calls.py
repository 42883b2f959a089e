"""Requests that are no model calls, such as token counts, are answered and never recorded."""

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agl.contracts import Upstream
from agl.dialects import Request
from agl_gateway.relay.side_calls import ESTIMATED_HEADER, estimate
from agl_gateway.wire.thoughts import seal
from agl_testing.model_server import Reply

from .conftest import listening

HELLO: list[Any] = [{"role": "user", "content": "hello there"}]
COUNT = "/messages/count_tokens"


def policy_at(address: str) -> Upstream:
    return Upstream(name="main_llm", base_url=address)


@asynccontextmanager
async def backend(routes: dict[str, Any], *, status: int = 200) -> AsyncIterator[tuple[str, list[Any]]]:
    """Run a server with a fixed answer per path; yields its address and the list of requests that it got."""
    seen: list[Any] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append((request.path_qs, await request.json(), dict(request.headers)))
        found = routes.get(request.path)
        return web.json_response(found, status=status) if found else web.json_response({"no": "route"}, status=404)

    async with listening(handle) as address:
        yield address, seen


async def post(url: str, body: Any, token: str) -> tuple[int, Any, bool]:
    """Send a request; returns the status, the answer, and whether the token count was estimated."""
    headers = {"x-api-key": token} if token else {}
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as reply:
        return reply.status, await reply.json(), ESTIMATED_HEADER in reply.headers


@pytest.mark.parametrize("is_in_path", [False, True])
async def test_policy_that_can_count_does(stage, is_in_path: bool):
    async with backend({f"/v1{COUNT}": {"input_tokens": 77}}) as (address, seen):
        upstream = Upstream(name="main_llm", base_url=f"{address}/v1", model="served")
        async with stage(upstreams=[upstream]) as it:
            attempt_id, token = await it.open_attempt()
            rollout_id = attempt_id.rpartition(".")[0]
            base = f"/rollout/{rollout_id}/attempt/{attempt_id}/key/{token}" if is_in_path else ""
            body = {"model": "main_llm", "messages": HELLO}
            found = await post(f"{it.url}{base}/v1{COUNT}?beta=true", body, "" if is_in_path else token)
            assert (200, {"input_tokens": 77}, False) == found
            assert [] == await it.spans(attempt_id)
    ((path, sent, headers),) = seen
    assert (f"/v1{COUNT}?beta=true", "served") == (path, sent["model"])
    assert token not in str(headers)


@pytest.mark.parametrize(
    ("endpoint", "body", "expected"),
    [
        (COUNT, {"messages": HELLO, "system": "x" * 4000}, {"input_tokens": 1007}),
        ("/responses/input_tokens", {"input": "x" * 400}, {"object": "response.input_tokens", "input_tokens": 100}),
    ],
    ids=["messages", "responses"],
)
async def test_count_is_estimated_where_the_policy_has_none(stage, endpoint: str, body: Any, expected: Any):
    async with backend({}) as (address, seen), stage(upstreams=[policy_at(f"{address}/v1")]) as it:
        attempt_id, token = await it.open_attempt()
        assert (200, expected, True) == await post(f"{it.url}/v1{endpoint}", {"model": "main_llm", **body}, token)
        assert [] == await it.spans(attempt_id)
    assert 1 == len(seen)


async def test_count_is_estimated_where_the_policys_server_is_gone(stage):
    async with stage(upstreams=[policy_at("http://127.0.0.1:9/v1")]) as it:
        _, token = await it.open_attempt()
        status, _, is_estimated = await post(f"{it.url}/v1{COUNT}", {"model": "main_llm", "messages": HELLO}, token)
        assert (200, True) == (status, is_estimated)
        status, found, _ = await post(f"{it.url}/v1/responses/compact", {"model": "main_llm", "input": []}, token)
        assert 502 == status
        assert "cannot be reached" in found["error"]["message"]


async def test_refusal_of_the_policys_server_is_passed_on(stage):
    routes = {f"/v1{COUNT}": {"error": "no"}}
    async with backend(routes, status=429) as (address, _), stage(upstreams=[policy_at(f"{address}/v1")]) as it:
        _, token = await it.open_attempt()
        assert (429, {"error": "no"}, False) == await post(f"{it.url}/v1{COUNT}", {"model": "main_llm"}, token)


async def test_compaction_is_the_servers_and_is_not_recorded(stage):
    compacted = {"output": [{"type": "compaction", "encrypted_content": "abc"}]}
    routes = {"/v1/responses/compact": compacted}
    async with backend(routes) as (address, _), stage(upstreams=[policy_at(f"{address}/v1")]) as it:
        attempt_id, token = await it.open_attempt()
        body = {"model": "main_llm", "input": HELLO}
        assert (200, compacted, False) == await post(f"{it.url}/v1/responses/compact", body, token)
        assert [] == await it.spans(attempt_id)


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ([], 400, "not a JSON object"),
        ({"model": "other"}, 404, "unknown model 'other'"),
    ],
    ids=["list", "model"],
)
async def test_bad_count_is_refused_in_the_words_of_its_api(stage, body: Any, status: int, told: str):
    policies = [Upstream(name=name, base_url="http://127.0.0.1:9/v1") for name in ("one", "two")]
    async with stage(upstreams=policies) as it:
        _, token = await it.open_attempt()
        answered, found, _ = await post(f"{it.url}/v1{COUNT}", body, token)
        assert (status, "error") == (answered, found["type"])
        assert told in found["error"]["message"]


async def test_count_needs_a_token(stage):
    async with stage() as it:
        await it.open_attempt()
        status, found, _ = await post(f"{it.url}/v1{COUNT}", {"model": "main_llm"}, "")
        assert (401, "authentication_error") == (status, found["error"]["type"])


def test_estimate_counts_text_of_every_part_and_images_by_number():
    image = {"type": "image", "source": {"type": "base64", "data": "A" * 1_000_000}}
    parts = [{"type": "text", "text": "x" * 40}, image, image]
    asked = Request("messages", json.dumps({"messages": [{"role": "user", "content": parts}]}).encode())
    assert 3200 <= estimate(asked) <= 3230
    assert 1 == estimate(Request("messages", b"{}"))
    assert 250_000 <= estimate(Request("messages", b'{"system": "%s"}' % (b"x" * 1_000_000))) < 250_010


def test_estimate_reads_googles_fields_in_either_spelling():
    part = {"mime_type": "image/png", "data": "A" * 1_000_000}
    for key, image in (("system_instruction", "inline_data"), ("systemInstruction", "inlineData")):
        body = {key: {"parts": [{"text": "x" * 4000}]}, "contents": [{"parts": [{image: part}]}]}
        assert 2600 <= estimate(Request("chat", json.dumps(body).encode())) <= 2620


THOUGHTS = "first one, then the other, and at last both of them at once. " * 60
SEALED_BLOCK = {"type": "thinking", "thinking": "", "signature": seal({"type": "thinking", "thinking": THOUGHTS})}
SEALED_ITEM = {"type": "reasoning", "encrypted_content": seal({"content": [{"text": THOUGHTS}]})}


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (COUNT, {"messages": [{"role": "assistant", "content": [SEALED_BLOCK]}]}),
        ("/responses/input_tokens", {"input": [SEALED_ITEM]}),
    ],
    ids=["messages", "responses"],
)
async def test_sealed_thoughts_are_counted_as_the_text_that_the_policy_reads(stage, endpoint: str, body: Any):
    async with backend({}) as (address, seen), stage(upstreams=[policy_at(f"{address}/v1")]) as it:
        _, token = await it.open_attempt()
        status, found, is_estimated = await post(f"{it.url}/v1{endpoint}", {"model": "main_llm", **body}, token)
    ((_, sent, _),) = seen
    assert (200, True, True) == (status, is_estimated, THOUGHTS in str(sent))
    assert len(THOUGHTS) // 4 <= found["input_tokens"] <= len(THOUGHTS) // 4 + 30


async def test_clients_that_look_whether_anything_is_here_are_answered(stage):
    async with stage() as it, aiohttp.ClientSession() as session:
        async with session.head(it.url) as reply:
            assert (200, b"") == (reply.status, await reply.read())
        async with session.get(it.url) as reply:
            assert {"service": "agl gateway"} == await reply.json()


@pytest.mark.parametrize("path", ["", "/v1"])
async def test_address_without_v1_is_reported_once(stage, caplog: pytest.LogCaptureFixture, path: str):
    async with backend({}) as (address, _), stage(upstreams=[policy_at(address + path)]) as it:
        _, token = await it.open_attempt()
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                body = {"model": "main_llm", "messages": HELLO}
                assert 404 == (await post(f"{it.url}/v1/chat/completions", body, token))[0]
    told = [record.getMessage() for record in caplog.records if "try " in record.getMessage()]
    assert ([] if path else [f"try {address}/v1"]) == [text[text.index("try ") :] for text in told]


async def test_model_calls_beside_counts_are_recorded(stage):
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        it.server.enqueue(Reply(text="hi"))
        body = {"model": "main_llm", "messages": HELLO, "max_tokens": 8}
        assert 200 == (await post(f"{it.url}/v1/messages", body, token))[0]
        assert 200 == (await post(f"{it.url}/v1{COUNT}", body, token))[0]
        assert 1 == len(await it.calls(attempt_id))
