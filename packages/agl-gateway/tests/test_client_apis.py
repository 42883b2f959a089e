"""Calls of messages and responses reach a policy in training as chat completions, so their tokens are known."""

import json
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import anthropic
import msgspec
import openai
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from agl.contracts import RolloutQuery, Upstream
from agl.dialects import Request
from agl.episodes import build_episode
from agl.errors import ConfigError
from agl_gateway.relay.relay import DROPPED_HEADER
from agl_gateway.relay.sender import ClientApis
from agl_gateway.wire.messages import MessagesTranslation
from agl_gateway.wire.problems import Problem
from agl_gateway.wire.responses import ResponsesTranslation
from agl_testing.model_server import Cut, Garbage, Reply, Status, ToolCall

from .conftest import listening

HELLO = "hello there, how are you?"
JSON_TYPE = "application/json"
SCHEMA = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}
CALLED = (ToolCall("add", '{"a":[1,2]}'), ToolCall("add", '{"a":[3]}'))


@asynccontextmanager
async def claude(it: Any, token: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=it.url, api_key=token, max_retries=0, timeout=60.0) as client:
        yield client


async def row_lengths(it: Any, attempt_id: str) -> tuple[list[int], int]:
    """Return the number of trained tokens in each row of an attempt, and the number of sampled tokens."""
    spans = await it.spans(attempt_id)
    (rollout,) = await it.store.rollouts(RolloutQuery(ids=(attempt_id.rpartition(".")[0],)))
    (attempt,) = await it.store.attempts(rollout.rollout_id)
    rows = build_episode(rollout, attempt, spans).rows
    return [sum(row.mask) for row in rows], sum(span.call.response_len for span in spans)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["plain", "streamed"])
async def test_messages_are_recorded_with_their_tokens(stage, is_streamed: bool):
    asked: dict[str, Any] = {
        "model": "main_llm",
        "max_tokens": 64,
        "system": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}],
        "messages": [{"role": "user", "content": "hi"}],
        "stop_sequences": ["END"],
        "extra_body": {"top_k": 20},
    }
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        async with claude(it, token) as client:
            if is_streamed:
                async with client.messages.stream(**asked) as stream:
                    pieces = [text async for text in stream.text_stream]
                    found = await stream.get_final_message()
                assert len(pieces) > 1
            else:
                found = await client.messages.create(**asked)
        (call,) = await it.calls(attempt_id)
    assert ([HELLO], "end_turn") == ([block.text for block in found.content], found.stop_reason)
    assert (call.prompt_len, call.response_len) == (found.usage.input_tokens, found.usage.output_tokens)
    assert ("chat", "", is_streamed, True) == (call.dialect, call.ids_missing, call.is_streamed, call.is_complete)
    assert call.response_len == len(call.logprobs) // 4 > 0
    system = {"role": "system", "content": "be\nbrief"}
    assert [system, {"role": "user", "content": "hi"}] == call.request["messages"]
    assert (64, 20, ("END",)) == (call.sampling.max_tokens, call.sampling.top_k, call.sampling.stop)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["plain", "streamed"])
async def test_responses_are_recorded_with_their_tokens(stage, is_streamed: bool):
    asked: dict[str, Any] = {"model": "main_llm", "instructions": "be brief", "input": "hi", "max_output_tokens": 64}
    async with stage() as it, AsyncExitStack() as opened:
        attempt_id, token = await it.open_attempt()
        client = await opened.enter_async_context(it.openai(token))
        if is_streamed:
            async with client.responses.stream(**asked) as stream:
                pieces = [event.delta async for event in stream if event.type == "response.output_text.delta"]
                found = await stream.get_final_response()
            assert (HELLO, True) == ("".join(pieces), len(pieces) > 1)
        else:
            found = await client.responses.create(**asked)
        (call,) = await it.calls(attempt_id)
    assert (HELLO, "completed") == (found.output_text, found.status)
    assert (call.prompt_len, call.response_len) == (found.usage.input_tokens, found.usage.output_tokens)
    assert ("chat", "", is_streamed, True) == (call.dialect, call.ids_missing, call.is_streamed, call.is_complete)
    system = {"role": "system", "content": "be brief"}
    assert [system, {"role": "user", "content": "hi"}] == call.request["messages"]
    assert 64 == call.sampling.max_tokens


@pytest.mark.parametrize("is_streamed", [False, True], ids=["plain", "streamed"])
async def test_parallel_calls_of_messages_and_their_results_are_one_row(stage, is_streamed: bool):
    tools = [{"name": "add", "description": "adds", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": "sum"}]
    asked: dict[str, Any] = {"model": "main_llm", "max_tokens": 64, "tools": tools, "messages": messages}
    async with stage() as it:
        it.server.enqueue(Reply(text="let me see", tool_calls=CALLED), Reply(text="6"))
        attempt_id, token = await it.open_attempt()
        async with claude(it, token) as client:
            if is_streamed:
                async with client.messages.stream(**asked) as stream:
                    found = await stream.get_final_message()
            else:
                found = await client.messages.create(**asked)
            calls = [block for block in found.content if block.type == "tool_use"]
            results = [
                {"type": "tool_result", "tool_use_id": one.id, "content": [{"type": "text", "text": "3"}]}
                for one in calls
            ]
            messages += [{"role": "assistant", "content": found.content}, {"role": "user", "content": results}]
            assert "6" == (await client.messages.create(**asked)).content[0].text
        trained, sampled = await row_lengths(it, attempt_id)
        declared = it.server.calls[0].json["tools"]
    assert ("tool_use", [("add", {"a": [1, 2]}), ("add", {"a": [3]})]) == (
        found.stop_reason,
        [(one.name, one.input) for one in calls],
    )
    assert [sampled] == trained
    function = {"name": "add", "description": "adds", "parameters": SCHEMA}
    assert [{"type": "function", "function": function}] == declared


@pytest.mark.parametrize("is_streamed", [False, True], ids=["plain", "streamed"])
async def test_parallel_calls_of_responses_and_their_results_are_one_row(stage, is_streamed: bool):
    """The arguments keep their exact text; one tool is in a namespace, and one takes free text."""
    inner = {"type": "function", "name": "add", "parameters": SCHEMA}
    tools: list[Any] = [
        {"type": "namespace", "name": "math", "tools": [inner]},
        {"type": "custom", "name": "patch", "description": "patches"},
    ]
    called = (ToolCall("math__add", '{ "a": [1,2] }'), ToolCall("patch", '{"input":"*** Begin"}'))
    listed: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "sum"}]}]
    asked: dict[str, Any] = {"model": "main_llm", "tools": tools, "input": listed, "store": False}
    async with stage() as it, AsyncExitStack() as opened:
        it.server.enqueue(Reply(text="let me see", tool_calls=called), Reply(text="6"))
        attempt_id, token = await it.open_attempt()
        client = await opened.enter_async_context(it.openai(token))
        if is_streamed:
            events = [event async for event in await client.responses.create(stream=True, **asked)]
            output = events[-1].response.output
            done = [event.item for event in events if event.type == "response.output_item.done"]
            assert [item.model_dump() for item in done] == [item.model_dump() for item in output]
            assert [*range(len(events))] == [event.sequence_number for event in events]
        else:
            output = (await client.responses.create(**asked)).output
        _, add, patch = output
        listed += [item.model_dump(exclude_none=True) for item in output]
        listed += [
            {"type": "function_call_output", "call_id": add.call_id, "output": "3"},
            {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "done"},
        ]
        assert "6" == (await client.responses.create(**asked)).output_text
        trained, sampled = await row_lengths(it, attempt_id)
        names = [tool["function"]["name"] for tool in it.server.calls[0].json["tools"]]
    assert ("add", "math", '{ "a": [1,2] }') == (add.name, add.namespace, add.arguments)
    assert ("custom_tool_call", "patch", "*** Begin") == (patch.type, patch.name, patch.input)
    assert [sampled] == trained
    assert ["math__add", "patch"] == names


def chat_chunks(message: dict[str, Any], reason: str = "stop") -> list[dict[str, Any]]:
    """Return the chunks of a streamed chat completion, with thoughts and text in two pieces each."""
    head = {"id": "chatcmpl-7", "object": "chat.completion.chunk", "created": 5, "model": "scripted"}
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for key in ("reasoning_content", "content"):
        text = message.get(key) or ""
        deltas += [{key: part} for part in (text[:2], text[2:]) if part]
    calls = [{"index": at, **call} for at, call in enumerate(message.get("tool_calls", ()))]
    deltas += [{"tool_calls": [call]} for call in calls]
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    return [*chunks, {**head, "choices": [], "usage": usage}]


def as_stream(chunks: Sequence[dict[str, Any]], *, is_whole: bool = True) -> bytes:
    return b"".join(b"data: %b\n\n" % msgspec.json.encode(one) for one in chunks) + b"data: [DONE]\n\n" * is_whole


TRANSLATIONS = {"messages": MessagesTranslation, "responses": ResponsesTranslation}


def translated(dialect: Any, asked: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the translation of a call, and the chat completion request that it makes."""
    translation = TRANSLATIONS[dialect]()
    return translation, translation.asked(Request(dialect, msgspec.json.encode(asked))).to_dict() or {}


def events_of(dialect: Any, data: bytes, *, step: int = 7, asked: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return the client's events, without pings, for a chat completion that arrives in pieces of ``step`` bytes."""
    translation, _ = translated(dialect, {"model": "m", "stream": True, **(asked or {})})
    stream = translation.stream()
    found = b"".join(stream.feed(data[at : at + step]) for at in range(0, len(data), step)) + stream.end()
    events = [event.split("\ndata: ") for event in found.decode().split("\n\n") if event]
    assert all(name == f"event: {json.loads(data)['type']}" for name, data in events)
    return [event for _, data in events if (event := json.loads(data))["type"] != "ping"]


THOUGHTFUL = {
    "role": "assistant",
    "content": "so 42",
    "reasoning_content": "add them",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}],
}


def test_events_of_messages_come_in_the_order_of_the_api():
    events = events_of("messages", as_stream(chat_chunks(THOUGHTFUL, "tool_calls")))
    kinds = [event["type"].removeprefix("content_block_") for event in events]
    block = ["start", "delta", "delta", "stop"]
    thinking = ["start", "delta", "delta", "delta", "stop"]
    call = ["start", "delta", "stop"]
    assert ["message_start", *thinking, *block, *call, "message_delta", "message_stop"] == kinds
    assert [0] * 5 + [1] * 4 + [2] * 3 == [event["index"] for event in events if "index" in event]
    assert {"type": "tool_use", "id": "c1", "name": "add", "input": {}} == events[-5]["content_block"]
    assert "tool_use" == events[-2]["delta"]["stop_reason"]
    usage = events[-2]["usage"]
    assert (6, 3, 4) == (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"])


def test_events_of_responses_come_in_the_order_of_the_api():
    events = events_of("responses", as_stream(chat_chunks(THOUGHTFUL, "tool_calls")))
    kinds = [event["type"].removeprefix("response.") for event in events]
    added, done = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    thoughts = [*added, *(f"reasoning_text.{kind}" for kind in ("delta", "delta", "done")), *done]
    text = [*added, *(f"output_text.{kind}" for kind in ("delta", "delta", "done")), *done]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    ending = ["output_item.added", *call, "output_item.done", "completed"]
    assert ["created", "in_progress", *thoughts, *text, *ending] == kinds
    final = events[-1]["response"]
    assert ["reasoning", "message", "function_call"] == [item["type"] for item in final["output"]]
    assert (9, 3, 4, 2) == (
        final["usage"]["input_tokens"],
        final["usage"]["input_tokens_details"]["cached_tokens"],
        final["usage"]["output_tokens"],
        final["usage"]["output_tokens_details"]["reasoning_tokens"],
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=6), JSON, max_size=3).map(
    lambda found: msgspec.json.encode(found).decode()
)
CALLS = st.lists(st.tuples(st.sampled_from(["add", "mul", "a__b"]), ARGUMENTS), max_size=3)
ANSWERS = st.tuples(st.text(max_size=12), st.text(max_size=12), CALLS).filter(any)


def message_of(text: str, thoughts: str, calls: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return an answer's message as a server sends it; empty parts are left out."""
    listed = [
        {"id": f"c{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(calls)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    message |= {"reasoning_content": thoughts} if thoughts else {}
    return message | ({"tool_calls": listed} if listed else {})


@settings(max_examples=60)
@given(ANSWERS, st.integers(1, 40))
def test_answers_come_back_as_the_very_message(answer: Any, step: int):
    """A client that stores nothing else sends back the very message that the server wrote, streamed or not."""
    message = message_of(*answer)
    body = msgspec.json.encode({"id": "x", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
    user = {"role": "user", "content": "go on"}
    stream = as_stream(chat_chunks(message))
    for dialect in ("messages", "responses"):
        translation, _ = translated(dialect, {"model": "m"})
        whole = json.loads(translation.answer(body))
        events = events_of(dialect, stream, step=step)
        if dialect == "messages":
            streamed = _accumulated(events)
            back = [{"messages": [{"role": "assistant", "content": c}, user]} for c in (whole["content"], streamed)]
        else:
            outputs = (_without_text(whole["output"]), _without_text(events[-1]["response"]["output"]))
            back = [{"input": [*output, user]} for output in outputs]
        for given_back in back:
            assert [message, user] == translated(dialect, {"model": "m", **given_back})[1]["messages"]


def _without_text(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items as Codex stores them: without the text of thoughts."""
    return [
        {key: value for key, value in item.items() if key != "content" or item["type"] != "reasoning"}
        for item in output
    ]


def _accumulated(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the content of a streamed message without the text of thoughts, as a client may store it."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        delta = event.get("delta", {})
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif delta.get("type") == "text_delta":
            blocks[-1]["text"] += delta["text"]
        elif delta.get("type") == "input_json_delta":
            blocks[-1]["input"] = json.loads(delta["partial_json"])
        elif delta.get("type") == "signature_delta":
            blocks[-1]["signature"] = delta["signature"]
    return blocks


KINDS = st.sampled_from(
    [
        *("message", "function_call", "function_call_output", "custom_tool_call", "reasoning", "compaction"),
        *("text", "image", "document", "tool_use", "tool_result", "thinking", "input_text", "input_image"),
        *("namespace", "function", "custom", "web_search", "json_schema", "allowed_tools", "tool", "any"),
    ]
)
ROLES = st.sampled_from(["user", "assistant", "system", "developer"])
THINGS = st.recursive(
    JSON,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.fixed_dictionaries(
            {"type": KINDS | JSON},
            optional={
                "role": ROLES,
                **dict.fromkeys(
                    ("content", "output", "input", "tools", "name", "source", "arguments", "format"), inner
                ),
            },
        )
    ),
    max_leaves=8,
)
FIELDS = ("messages", "input", "system", "instructions", "tools", "tool_choice", "text", "output_config", "stream")


@settings(max_examples=80)
@given(st.sampled_from(["messages", "responses"]), st.dictionaries(st.sampled_from(FIELDS), THINGS, max_size=4))
def test_odd_requests_are_translated_or_refused(dialect: Any, body: dict[str, Any]):
    status = 0
    try:
        _, found = translated(dialect, {"model": "m", **body})
    except Problem as problem:
        status, found = problem.status, {}
    assert (400, {}) == (status, found) or "m" == found["model"]


@settings(max_examples=60)
@given(
    st.sampled_from(["messages", "responses"]), st.lists(JSON | st.fixed_dictionaries({"choices": JSON}), max_size=4)
)
def test_odd_answers_are_translated(dialect: Any, chunks: list[Any]):
    translation, _ = translated(dialect, {"model": "m"})
    for chunk in chunks:
        assert isinstance(json.loads(translation.answer(msgspec.json.encode(chunk))), dict)
        assert isinstance(json.loads(translation.failure(msgspec.json.encode(chunk), 500)), dict)
    events_of(dialect, as_stream(chunks))


def test_messages_of_a_harness_become_chat_messages():
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
    marked = {"type": "text", "text": "look", "cache_control": {"type": "ephemeral"}}
    results = [
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "a picture:"}, picture]},
        {"type": "tool_result", "tool_use_id": "c2", "content": "none", "is_error": True},
        marked,
    ]
    calls = [{"type": "tool_use", "id": f"c{at}", "name": "see", "input": {"at": at}} for at in (1, 2)]
    _, found = translated("messages", {
        "model": "m",
        "messages": [
            {"role": "user", "content": [marked, {"type": "document", "source": {"type": "text", "data": "a text"}}]},
            {"role": "system", "content": [{"type": "text", "text": "agents: none"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, *calls]},
            {"role": "user", "content": results},
        ],
        "tools": [{"name": "see", "input_schema": SCHEMA, "type": "custom"}],
        "tool_choice": {"type": "tool", "name": "see", "disable_parallel_tool_use": True},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": []},
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}},
        "metadata": {"user_id": "u"},
    })  # fmt: skip
    user, system, assistant, first, second, rest = found["messages"]
    assert ("look\na text", "agents: none") == (user["content"], system["content"])
    assert ("ab", ["c1", "c2"]) == (assistant["content"], [call["id"] for call in assistant["tool_calls"]])
    assert [("c1", "a picture:"), ("c2", "none")] == [(r["tool_call_id"], r["content"]) for r in (first, second)]
    assert ["data:image/png;base64,QUJD", "look"] == [
        rest["content"][0]["image_url"]["url"],
        rest["content"][1]["text"],
    ]
    assert {"type": "function", "function": {"name": "see"}} == found["tool_choice"]
    assert SCHEMA == found["response_format"]["json_schema"]["schema"]
    assert {"model", "messages", "tools", "tool_choice", "response_format"} == found.keys()


def test_input_of_a_harness_becomes_chat_messages():
    picture = {"type": "input_image", "image_url": "data:image/png;base64,QUJD"}
    _, found = translated("responses", {
        "model": "m",
        "instructions": "be brief",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "no network"}]},
            {"role": "user", "content": "look"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c1", "name": "see", "namespace": "eyes", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "***"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "a"}, picture]},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "well"}]},
            {"type": "web_search_call", "id": "w"},
        ],
        "tools": [{"type": "function", "name": "see", "parameters": SCHEMA}, {"type": "function", "name": "go"}],
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "go"}]},
        "text": {"format": {"type": "json_schema", "name": "form", "schema": SCHEMA}, "verbosity": "low"},
        "reasoning": {"effort": "high"},
        "parallel_tool_calls": False,
        "stream": True,
    })  # fmt: skip
    brief, rule, user, assistant, seen, patched, shown, said = found["messages"]
    assert ["system", "system", "user"] == [one["role"] for one in (brief, rule, user)]
    assert ("hm", None) == (assistant["reasoning_content"], assistant["content"])
    functions = [call["function"] for call in assistant["tool_calls"]]
    assert [("eyes__see", "{}"), ("patch", '{"input":"***"}')] == [(one["name"], one["arguments"]) for one in functions]
    assert [("c1", "a"), ("c2", "done")] == [(one["tool_call_id"], one["content"]) for one in (seen, patched)]
    assert ("image_url", "well") == (shown["content"][0]["type"], said["content"])
    assert (["go"], "required") == ([one["function"]["name"] for one in found["tools"]], found["tool_choice"])
    assert "form" == found["response_format"]["json_schema"]["name"]
    assert {"include_usage": True} == found["stream_options"]
    assert "parallel_tool_calls" not in found


SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 1}


@pytest.mark.parametrize(
    ("dialect", "body", "named"),
    [
        ("responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ("responses", {"input": [{"type": "compaction", "encrypted_content": "gAAA"}]}, "compaction"),
        ("responses", {"tools": [{"type": "web_search"}], "tool_choice": "required"}, "web_search"),
        ("responses", {"tool_choice": {"type": "web_search"}}, "web_search"),
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input_image",
        ),
        ("messages", {"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        ("messages", {"messages": [{"role": "assistant", "content": "{"}]}, "last message of the assistant"),
        ("messages", {"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "web_search"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "container_upload"}]}]}, "container_upload"),
    ],
)
def test_requests_that_no_policy_can_answer_are_refused(dialect: Any, body: dict[str, Any], named: str):
    with pytest.raises(Problem, match=f"nothing for .*{named}"):
        translated(dialect, {"model": "m", **body})


async def test_tools_of_the_provider_are_dropped_with_a_message(stage, caplog: pytest.LogCaptureFixture):
    responses = {"model": "main_llm", "input": "hi", "tools": [{"type": "web_search"}, {"type": "bad\r\nname €"}]}
    messages = {
        "model": "main_llm",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [SEARCH],
    }
    async with stage() as it, aiohttp.ClientSession() as session:
        _, token = await it.open_attempt()
        headers = {"authorization": f"Bearer {token}"}
        told = []
        for path, body in (("responses", responses), ("messages", messages), ("messages", messages)):
            async with session.post(f"{it.url}/v1/{path}", json=body, headers=headers) as reply:
                assert 200 == reply.status
                told.append(reply.headers[DROPPED_HEADER])
        assert all("tools" not in call.json for call in it.server.calls)
    assert ["web_search, badname ?", "web_search", "web_search"] == told
    assert 1 == sum("the tool 'web_search'" in record.message for record in caplog.records)


async def test_errors_have_the_shape_of_the_clients_api(stage):
    long = "The input (9 tokens) is longer than the model's context length (8 tokens)."
    async with stage() as it, AsyncExitStack() as opened:
        attempt_id, token = await it.open_attempt()
        it.server.enqueue(Status(code=429, message="slow down"), Status(code=400, message=long))
        it.server.enqueue(Status(code=429, message="slow down"), Status(code=400, message=long))
        asked: dict[str, Any] = {"model": "main_llm", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        async with claude(it, token) as client:
            with pytest.raises(anthropic.RateLimitError) as busy:
                await client.messages.create(**asked)
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long: The input"):
                await client.messages.create(**asked)
            with pytest.raises(anthropic.BadRequestError, match="nothing for mcp_servers"):
                await client.messages.create(**asked, extra_body={"mcp_servers": [1]})
        client = await opened.enter_async_context(it.openai(token))
        with pytest.raises(openai.RateLimitError, match="slow down"):
            await client.responses.create(model="main_llm", input="hi")
        with pytest.raises(openai.BadRequestError) as too_long:
            await client.responses.create(model="main_llm", input="hi")
        with pytest.raises(openai.BadRequestError, match="whole conversation"):
            await client.responses.create(model="main_llm", input="hi", previous_response_id="resp_1")
        calls = await it.calls(attempt_id)
    assert {"type": "rate_limit_error", "message": "slow down"} == busy.value.body["error"]
    assert "context_length_exceeded" == too_long.value.code
    assert [429, 400, 400, 429, 400, 400] == [call.status_code for call in calls]


@pytest.mark.parametrize("path", ["messages", "responses"])
async def test_stream_that_is_cut_is_no_whole_answer(stage, path: str):
    async with stage() as it, aiohttp.ClientSession() as session:
        attempt_id, token = await it.open_attempt()
        it.server.enqueue(Cut(after_chunks=3, reply=Reply(text="one two three four", chunks=4)))
        body = {"model": "main_llm", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "input": "hi"}
        received = b""
        headers = {"authorization": f"Bearer {token}"}
        async with session.post(f"{it.url}/v1/{path}", json={**body, "stream": True}, headers=headers) as reply:
            with pytest.raises(aiohttp.ClientPayloadError):  # noqa: PT012  # the loop ends by the error
                while True:
                    received += await reply.content.readany()
        (call,) = await it.calls(attempt_id)
    assert b"message_stop" not in received
    assert b"response.completed" not in received
    assert (False, True) == (call.is_complete, "broke off" in call.error)


def test_streams_that_fail_or_have_no_end_say_so():
    chunks = chat_chunks(THOUGHTFUL)
    broken = as_stream([*chunks[:3], {"error": {"message": "out of memory", "code": 500}}])
    for data, words in (
        (broken, "out of memory"),
        (as_stream(chunks[:3]), "ended before its answer did"),
        (b"", "ended"),
    ):
        *_, last = events_of("messages", data)
        assert ("error", "api_error") == (last["type"], last["error"]["type"])
        assert words in last["error"]["message"]
        *_, last = events_of("responses", data)
        assert ("response.failed", "failed") == (last["type"], last["response"]["status"])
        assert words in last["response"]["error"]["message"]


@pytest.mark.parametrize("data", [as_stream([{"error": {"message": "no memory"}}]), b""], ids=["error", "nothing"])
def test_response_that_fails_at_once_has_begun_before(data: bytes):
    """OpenAI's client accepts no other event before ``response.created``."""
    created, begun, failed = events_of("responses", data)
    assert ["response.created", "response.in_progress", "response.failed"] == [
        event["type"] for event in (created, begun, failed)
    ]
    assert [0, 1, 2] == [event["sequence_number"] for event in (created, begun, failed)]
    assert created["response"]["id"] == failed["response"]["id"]


def test_answers_that_are_cut_short_say_why():
    for reason, stop, status in (("length", "max_tokens", "incomplete"), ("content_filter", "refusal", "incomplete")):
        data = as_stream(chat_chunks({"content": "so"}, reason))
        assert stop == events_of("messages", data)[-2]["delta"]["stop_reason"]
        assert (f"response.{status}", status) == (
            events_of("responses", data)[-1]["type"],
            events_of("responses", data)[-1]["response"]["status"],
        )
    body = {"choices": [{"message": {"content": "so"}, "finish_reason": "stop", "stop_reason": "END"}]}
    found = json.loads(translated("messages", {})[0].answer(msgspec.json.encode(body)))
    assert ("stop_sequence", "END") == (found["stop_reason"], found["stop_sequence"])


def chat_body(message: dict[str, Any], reason: str = "stop") -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
    return msgspec.json.encode({"id": "1", "choices": [choice]})


@asynccontextmanager
async def chat_only(seen: list[str], *, statuses: list[int] | None = None, encoding: str = "") -> AsyncIterator[str]:
    """Run a server that has only chat completions; its first answers are errors with these ``statuses``."""

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append(request.path)
        if request.path != "/v1/chat/completions":
            raise web.HTTPNotFound
        if statuses:
            return web.json_response({"error": {"message": "not now"}}, status=statuses.pop(0))
        body = chat_body({"content": "42"})
        if encoding:
            body = zlib.compress(body, wbits={"gzip": 31, "zlib": 15, "raw": -15}[encoding])
        headers = {"content-encoding": "gzip" if encoding == "gzip" else "deflate"} if encoding else {}
        return web.Response(body=body, content_type=JSON_TYPE, headers=headers)

    async with listening(handle) as address:
        yield address


async def test_frozen_model_is_asked_as_the_client_asks_unless_its_server_has_only_chat(stage):
    seen: list[str] = []
    asked: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "?"}]}
    async with chat_only(seen) as address:
        async with stage(upstreams=[Upstream(name="m", base_url=f"{address}/v1")]) as it:
            attempt_id, token = await it.open_attempt()
            async with claude(it, token) as client:
                for _ in range(2):
                    assert "42" == (await client.messages.create(**asked)).content[0].text
            calls = await it.calls(attempt_id)
        assert ["/v1/messages", "/v1/chat/completions", "/v1/chat/completions"] == seen
        assert [("chat", 200)] * 2 == [(call.dialect, call.status_code) for call in calls]
        async with stage(upstreams=[Upstream(name="m", base_url=address)]) as it:
            _, token = await it.open_attempt()
            async with claude(it, token) as client:
                with pytest.raises(anthropic.NotFoundError):
                    await client.messages.create(**asked)
    async with stage(is_trained=False) as it:
        attempt_id, token = await it.open_attempt()
        async with claude(it, token) as client:
            await client.messages.create(**{**asked, "model": "main_llm"})
        (call,) = await it.calls(attempt_id)
    assert "messages" == call.dialect


@pytest.mark.parametrize("status", [401, 429, 503])
async def test_error_does_not_show_that_a_server_lacks_an_api(stage, status: int):
    """For example, Anthropic's server answers 404 for a model that it does not know."""
    seen: list[str] = []
    asked: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "?"}]}
    async with (
        chat_only(seen, statuses=[status]) as address,
        stage(upstreams=[Upstream(name="m", base_url=f"{address}/v1")]) as it,
    ):
        _, token = await it.open_attempt()
        async with claude(it, token) as client:
            with pytest.raises(anthropic.APIStatusError, match="not now"):
                await client.messages.create(**asked)
            await client.messages.create(**asked)
            await client.messages.create(**asked)
    chat = "/v1/chat/completions"
    assert ["/v1/messages", chat, "/v1/messages", chat, chat] == seen


@pytest.mark.parametrize("encoding", ["gzip", "zlib", "raw"])
async def test_answer_of_a_server_that_compresses_unasked_is_translated(stage, encoding: str):
    seen: list[str] = []
    asked: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "?"}]}
    async with (
        chat_only(seen, encoding=encoding) as address,
        stage(upstreams=[Upstream(name="m", base_url=f"{address}/v1")]) as it,
    ):
        _, token = await it.open_attempt()
        async with claude(it, token) as client:
            assert "42" == (await client.messages.create(**asked)).content[0].text


def test_unknown_native_api_is_refused():
    with pytest.raises(ConfigError, match="messages"):
        ClientApis(["mesages"])


async def test_compaction_is_a_summary_by_the_policy_and_goes_on_from_it(stage):
    said: list[Any] = [
        {"role": "user", "content": "count to three"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": [{"type": "input_text", "text": "go on"}]},
    ]
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        async with it.openai(token) as client:
            shorter = await client.responses.compact(model="main_llm", input=said, instructions="count")
            kept = [item.model_dump(exclude_none=True, warnings=False) for item in shorter.output]
            await client.responses.create(model="main_llm", input=kept)
        summarized, after = await it.calls(attempt_id)
    assert ("response.compaction", ["message", "message", "compaction"]) == (
        shorter.object,
        [item.type for item in shorter.output],
    )
    assert (summarized.prompt_len, summarized.response_len) == (
        shorter.usage.input_tokens,
        shorter.usage.output_tokens,
    )
    *before, asked = summarized.request["messages"]
    assert ["system", "user", "assistant", "user"] == [message["role"] for message in before]
    assert "Summarize this conversation" in asked["content"]
    assert ["count to three", "go on", HELLO] == [_plain(message) for message in after.request["messages"]]


async def test_compaction_without_a_summary_is_an_error(stage):
    """A policy that thinks until its context is full writes no summary, and the conversation would be lost."""
    thinking = {"role": "assistant", "content": None, "reasoning_content": "where was I"}
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        it.server.enqueue(Garbage(body=chat_body(thinking, "length"), content_type=JSON_TYPE))
        async with it.openai(token) as client:
            with pytest.raises(openai.InternalServerError, match=r"no summary .* 'length'"):
                await client.responses.compact(model="main_llm", input=[{"role": "user", "content": "count"}])
        assert [200] == [call.status_code for call in await it.calls(attempt_id)]


async def test_nothing_to_compact_is_refused(stage):
    async with stage() as it:
        _, token = await it.open_attempt()
        async with it.openai(token) as client:
            with pytest.raises(openai.BadRequestError, match="nothing to compact"):
                await client.responses.compact(model="main_llm", input=[])


def _plain(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
