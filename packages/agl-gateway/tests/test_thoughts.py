"""A model's thoughts survive clients that store nothing of them but a field that they cannot read."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from agl.contracts import Upstream
from agl.dialects import Request
from agl_gateway.wire.google import messages_of
from agl_gateway.wire.problems import Problem
from agl_gateway.wire.thoughts import MARK, Unsealer, restored, seal

from .conftest import listening

THINKING = {"type": "thinking", "thinking": "add them", "signature": ""}
REASONING = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "add them"}],
}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "42"}]}
MESSAGE = {"id": "m", "type": "message", "role": "assistant", "content": [THINKING, {"type": "text", "text": "42"}]}
RESPONSE = {"id": "r", "status": "completed", "output": [REASONING, SAID]}
MESSAGES_EVENTS = [
    {"type": "message_start", "message": {**MESSAGE, "content": []}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "add "}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "them"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_stop", "index": 1},
    {"type": "message_stop"},
]
RESPONSES_EVENTS = [
    {"type": "response.created", "response": {"id": "r", "output": []}},
    {"type": "response.output_item.done", "output_index": 0, "item": REASONING},
    {"type": "response.completed", "response": RESPONSE},
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def unseal(text: Any) -> Any:
    return Unsealer().read(text)


@given(JSON)
def test_sealed_values_come_back_in_either_alphabet(value: Any):
    assert value == unseal(seal(value))
    assert value == unseal(seal(value).replace("+", "-").replace("/", "_").rstrip("="))


@pytest.mark.parametrize("text", [None, 7, "", "abc", MARK.decode(), MARK.decode() + "!!", seal([1])[:-6], "€" * 20])
def test_foreign_signatures_hold_nothing(text: Any):
    assert unseal(text) is None


def test_bomb_is_not_inflated():
    with pytest.raises(Problem, match=r"sealed thoughts .* 8 MiB"):
        unseal(seal("0" * 9_000_000))


SEALED_MIB = seal({"text": "0" * (1 << 20), "reasoning": "0" * (1 << 20)})
MANY = [
    ("responses", {"input": [{"encrypted_content": SEALED_MIB}]}),
    ("messages", {"messages": [{"content": [{"signature": SEALED_MIB}]}]}),
]


@pytest.mark.parametrize(("dialect", "body"), MANY, ids=["responses", "messages"])
def test_seals_of_one_request_are_inflated_up_to_a_limit_together(dialect: Any, body: dict[str, Any]):
    ((key, items),) = body.items()
    assert 3 << 21 < len(restored(Request(dialect, msgspec.json.encode({key: items * 3}))).body)
    with pytest.raises(Problem, match=r"sealed thoughts .* 8 MiB"):
        restored(Request(dialect, msgspec.json.encode({key: items * 5})))


def test_seals_of_googles_api_are_inflated_up_to_a_limit_together():
    signature = seal({"text": "0" * (1 << 20), "fields": {"reasoning": "0" * (1 << 20)}})
    part = {"text": "so", "thoughtSignature": signature}
    (message,) = messages_of({"contents": [{"role": "model", "parts": [part] * 3}]})
    assert 1 << 20 == len(message["reasoning"])
    with pytest.raises(Problem, match=r"sealed thoughts .* 8 MiB"):
        messages_of({"contents": [{"role": "model", "parts": [part]}] * 5})


async def test_seal_of_many_values_is_refused(stage):
    item = {"type": "reasoning", "encrypted_content": seal({"fields": {"reasoning_details": [[]] * 300_000}})}
    async with stage() as it:
        _, token = await it.open_attempt()
        (found,) = await answer(it, "/v1/responses", token, {"model": "main_llm", "input": [item]})
        assert "request_too_large" == found["error"]["code"]
        assert [] == it.server.calls


def test_text_in_which_a_seal_is_quoted_stays():
    for dialect, body in (
        ("responses", {"input": f"what is {MARK.decode()}?"}),
        ("responses", {"instructions": MARK.decode()}),
        ("messages", {"system": MARK.decode(), "messages": "none"}),
    ):
        assert body == restored(Request(dialect, msgspec.json.encode(body))).to_dict()


@asynccontextmanager
async def backend(body: Any, events: list[Any], seen: list[Any]) -> AsyncIterator[str]:
    """Run a server whose answers hold unsigned thoughts; its events arrive in pieces of odd sizes."""

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        if not seen[-1].get("stream"):
            return web.json_response(body)
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        data = b"".join(b"event: %b\ndata: %b\n\n" % (e["type"].encode(), msgspec.json.encode(e)) for e in events)
        for at in range(0, len(data), 37):
            await reply.write(data[at : at + 37])
        return reply

    async with listening(handle) as address:
        yield f"{address}/v1"


async def answer(it: Any, path: str, token: str, body: Any) -> list[dict[str, Any]]:
    """Return the answer, or its events, as the client gets them."""
    sent = {"authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession() as session, session.post(it.url + path, json=body, headers=sent) as reply:
        text = await reply.text()
    if not body.get("stream"):
        return [json.loads(text)]
    return [json.loads(event.partition("data: ")[2]) for event in text.split("\n\n") if event]


@pytest.mark.parametrize("is_streamed", [False, True], ids=["plain", "streamed"])
async def test_reasoning_survives_a_client_without_a_memory(stage, is_streamed: bool):
    seen: list[Any] = []
    async with (
        backend(RESPONSE, RESPONSES_EVENTS, seen) as address,
        stage(upstreams=[Upstream(name="main_llm", base_url=address)]) as it,
    ):
        attempt_id, token = await it.open_attempt()
        asked = {"model": "m", "stream": is_streamed, "store": False, "include": ["reasoning.encrypted_content"]}
        found = await answer(it, "/v1/responses", token, {**asked, "input": "6*7?"})
        output = (found[-1]["response"] if is_streamed else found[0])["output"]
        kept = {key: output[0][key] for key in ("type", "id", "summary", "encrypted_content")}
        if is_streamed:
            assert kept["encrypted_content"] == found[1]["item"]["encrypted_content"]
        await answer(it, "/v1/responses", token, {**asked, "input": [kept, SAID, {"role": "user", "content": "?"}]})
        calls = await it.calls(attempt_id)
    assert [REASONING, SAID] == seen[1]["input"][:2]
    assert [REASONING, SAID] == calls[1].request["input"][:2]
    assert "encrypted_content" not in str(calls[0].response)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["plain", "streamed"])
async def test_thinking_survives_a_client_that_drops_its_text(stage, is_streamed: bool):
    seen: list[Any] = []
    async with (
        backend(MESSAGE, MESSAGES_EVENTS, seen) as address,
        stage(upstreams=[Upstream(name="main_llm", base_url=address)]) as it,
    ):
        attempt_id, token = await it.open_attempt()
        asked = {"model": "m", "stream": is_streamed, "max_tokens": 9, "thinking": {"type": "adaptive"}}
        found = await answer(it, "/v1/messages", token, {**asked, "messages": []})
        if is_streamed:
            signed = [event["delta"]["signature"] for event in found if "signature" in event.get("delta", {})]
            assert [*MESSAGES_EVENTS[:4], *MESSAGES_EVENTS[4:]] == [e for e in found if "signature" not in str(e)]
        else:
            signed = [found[0]["content"][0]["signature"]]
        kept = {"type": "thinking", "thinking": "", "signature": signed[0]}
        await answer(it, "/v1/messages", token, {**asked, "messages": [{"role": "assistant", "content": [kept, "?"]}]})
        calls = await it.calls(attempt_id)
    assert "add them" == seen[1]["messages"][0]["content"][0]["thinking"]
    assert "add them" == calls[1].request["messages"][0]["content"][0]["thinking"]
    assert MARK.decode() not in str(seen)


def test_thoughts_of_translated_answers_reach_servers_of_the_clients_api():
    sealed = seal({"fields": {"reasoning": "add them", "reasoning_details": []}})
    block, item = {"type": "thinking", "signature": sealed}, {"type": "reasoning", "encrypted_content": sealed}
    messages = restored(Request("messages", msgspec.json.encode({"messages": [{"content": [block]}]})))
    responses = restored(Request("responses", msgspec.json.encode({"input": [item]})))
    assert {"messages": [{"content": [THINKING]}]} == messages.to_dict()
    assert {"input": [{"type": "reasoning", "content": REASONING["content"]}]} == responses.to_dict()


async def test_fields_of_a_provider_are_recorded_as_the_provider_gets_them(stage):
    details = [{"type": "reasoning.encrypted", "data": "gAAA", "index": 0}]
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "reasoning_details": details, "tool_calls": [call]}
    seen: list[Any] = []
    async with (
        backend({"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}, [], seen) as address,
        stage(upstreams=[Upstream(name="main_llm", base_url=address, is_trained=True)]) as it,
    ):
        attempt_id, token = await it.open_attempt()
        asked = {"model": "main_llm", "max_tokens": 9, "messages": [{"role": "user", "content": "?"}]}
        (found,) = await answer(it, "/v1/messages", token, asked)
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "6"}]}
        asked["messages"] += [{"role": "assistant", "content": found["content"]}, result]
        await answer(it, "/v1/messages", token, asked)
        first, second = await it.calls(attempt_id)
    assert message == seen[1]["messages"][1] == second.request["messages"][1]
    assert message == first.response["choices"][0]["message"]


def test_foreign_thoughts_are_left_alone():
    for dialect, body in (
        ("responses", {"input": [{"type": "reasoning", "encrypted_content": "gAAAA"}]}),
        ("responses", {"input": [1, None, {"encrypted_content": MARK.decode()}]}),
        ("messages", {"messages": [{"content": "x"}, {"content": [{"signature": MARK.decode() + "x"}, 3]}, None]}),
        ("chat", {"messages": [{"signature": seal({"a": 1})}]}),
    ):
        asked = Request(dialect, json.dumps(body).encode())
        assert body == restored(asked).to_dict()


async def test_fields_of_harnesses_reach_the_policy_and_the_record(stage):
    """Cache marks, tools in namespaces, and system messages within a conversation reach both unchanged."""
    marked = {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}
    messages = {
        "model": "main_llm",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, marked],
        "messages": [{"role": "user", "content": [marked]}, {"role": "system", "content": "agents: none"}],
    }
    space = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]}
    responses = {"model": "main_llm", "input": "hi", "tools": [space, {"type": "web_search"}], "store": False}
    async with stage(is_trained=False) as it:
        attempt_id, token = await it.open_attempt()
        await answer(it, "/v1/messages", token, messages)
        await answer(it, "/v1/responses", token, responses)
        calls = await it.calls(attempt_id)
        sent = [call.json for call in it.server.calls]
    assert [messages, responses] == [{**one, "model": "main_llm"} for one in sent]
    assert [messages, responses] == [call.request for call in calls]
