"""Calls of Google's API reach the policy as chat completions, and come back as Google's own client reads them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import httpx
import pytest
from google import genai
from google.genai import errors, types

from agl.contracts import RolloutQuery, Upstream
from agl.dialects import Request
from agl.episodes import build_episode
from agl_gateway.relay.side_calls import ESTIMATED_HEADER
from agl_gateway.wire.google import GoogleTranslation, chat_request, messages_of
from agl_gateway.wire.problems import Problem
from agl_testing.model_server import Cut, Reply, Status, ToolCall

ADD = types.FunctionDeclaration(
    name="add",
    description="adds",
    parameters=types.Schema(
        type=types.Type.OBJECT, properties={"a": types.Schema(type=types.Type.ARRAY, items={"type": "INTEGER"})}
    ),
)
TOOLS = types.Tool(function_declarations=[ADD])


@asynccontextmanager
async def client(it: Any, token: str, *, base: str = "") -> AsyncIterator[Any]:
    """Return Google's client over httpx, because over aiohttp it emits warnings."""
    async with httpx.AsyncClient(timeout=60.0) as http:
        options = types.HttpOptions(base_url=base or it.url, httpx_async_client=http)
        yield genai.Client(api_key=token, vertexai=False, http_options=options).aio.models


async def test_whole_call_is_translated_and_recorded_with_its_tokens(stage):
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        config = types.GenerateContentConfig(
            system_instruction="be brief", temperature=0.5, top_k=20, max_output_tokens=32, stop_sequences=["END"]
        )
        async with client(it, token) as models:
            found = await models.generate_content(model="main_llm", contents="hi", config=config)
        (call,) = await it.calls(attempt_id)
    assert ("hello there, how are you?", "STOP") == (found.text, found.candidates[0].finish_reason)
    usage = found.usage_metadata
    assert (call.prompt_len, call.response_len) == (usage.prompt_token_count, usage.candidates_token_count)
    assert ("chat", "", 200) == (call.dialect, call.ids_missing, call.status_code)
    assert call.response_len == len(call.logprobs) // 4 > 0
    expected = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert expected == call.request["messages"]
    sampling = call.sampling
    assert (0.5, 20, 32, ("END",)) == (sampling.temperature, sampling.top_k, sampling.max_tokens, sampling.stop)
    assert token not in str(it.server.calls[0].headers) + it.server.calls[0].path


async def test_stream_arrives_in_pieces_and_ends_with_its_usage(stage):
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        async with client(it, token) as models:
            stream = await models.generate_content_stream(model="main_llm", contents="hi")
            pieces = [piece async for piece in stream]
        (call,) = await it.calls(attempt_id)
    assert "hello there, how are you?" == "".join(piece.text or "" for piece in pieces)
    assert len([piece for piece in pieces if piece.text]) > 1
    assert call.response_len == pieces[-1].usage_metadata.candidates_token_count
    assert (True, True, "") == (call.is_streamed, call.is_complete, call.ids_missing)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["plain", "streamed"])
async def test_parallel_calls_and_their_results_continue_the_very_tokens(stage, is_streamed):
    """The arguments keep their exact text, which parsing would lose, so both calls are in one row."""
    called = (ToolCall("add", '{ "a": [1,2] }'), ToolCall("add", '{"a":[3]}'))
    async with stage() as it:
        it.server.enqueue(Reply(text="let me see", tool_calls=called), Reply(text="6"))
        attempt_id, token = await it.open_attempt()
        contents: list[Any] = [types.Content(role="user", parts=[types.Part(text="sum")])]
        asking = {"model": "main_llm", "config": types.GenerateContentConfig(tools=[TOOLS])}
        async with client(it, token) as models:
            if is_streamed:
                stream = await models.generate_content_stream(contents=contents, **asking)
                parts = [part async for piece in stream for part in piece.candidates[0].content.parts]
            else:
                parts = (await models.generate_content(contents=contents, **asking)).candidates[0].content.parts
            asked_for = [part.function_call for part in parts if part.function_call]
            results = [
                types.Part(function_response=types.FunctionResponse(id=one.id, name=one.name, response={"output": "3"}))
                for one in asked_for
            ]
            contents += [types.Content(role="model", parts=parts), types.Content(role="user", parts=results)]
            assert "6" == (await models.generate_content(contents=contents, **asking)).text
        spans = await it.spans(attempt_id)
        (rollout,) = await it.store.rollouts(RolloutQuery(ids=(attempt_id.rpartition(".")[0],)))
        (attempt,) = await it.store.attempts(rollout.rollout_id)
    assert [("add", {"a": [1, 2]}), ("add", {"a": [3]})] == [(one.name, one.args) for one in asked_for]
    (row,) = build_episode(rollout, attempt, spans).rows
    assert sum(row.mask) == sum(span.call.response_len for span in spans)
    declared = it.server.calls[0].json["tools"][0]["function"]
    assert {"type": "array", "items": {"type": "integer"}} == declared["parameters"]["properties"]["a"]


async def test_array_is_streamed_without_alt_sse_and_models_are_listed(stage):
    async with stage() as it, aiohttp.ClientSession() as session:
        _, token = await it.open_attempt()
        url, body = f"{it.url}/v1beta/models", {"contents": [{"parts": [{"text": "hi"}]}]}
        async with session.post(f"{url}/main_llm:streamGenerateContent?key={token}", json=body) as reply:
            assert "application/json" == reply.content_type
            found = await reply.json()
        assert "hello there, how are you?" == "".join(
            part["text"] for one in found for each in one.get("candidates", ()) for part in each["content"]["parts"]
        )
        assert "key=" not in it.server.calls[0].path
        async with session.get(url, headers={"x-goog-api-key": token}) as reply:
            assert "models/main_llm" == (await reply.json())["models"][0]["name"]


async def test_count_is_estimated_and_not_recorded(stage):
    async with stage() as it, aiohttp.ClientSession() as session:
        attempt_id, token = await it.open_attempt()
        async with client(it, token) as models:
            counted = await models.count_tokens(model="main_llm", contents="x" * 400)
        assert 100 <= counted.total_tokens <= 110
        url, headers = f"{it.url}/v1beta/models/main_llm:countTokens", {"x-goog-api-key": token}
        image = {"parts": [{"inlineData": {"mimeType": "image/png", "data": "A" * 100_000}}]}
        async with session.post(url, json={"contents": [image]}, headers=headers) as reply:
            assert (True, 1600) == (ESTIMATED_HEADER in reply.headers, (await reply.json())["totalTokens"] // 100 * 100)
        async with session.post(url, data=b"[]", headers=headers) as reply:
            assert (400, "INVALID_ARGUMENT") == (reply.status, (await reply.json())["error"]["status"])
        assert [] == await it.spans(attempt_id)


async def test_errors_have_googles_shape(stage):
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        it.server.enqueue(Status(code=429, message="slow down"))
        search = types.GenerateContentConfig(tools=[types.Tool(google_search=types.GoogleSearch())])
        async with client(it, token) as models:
            with pytest.raises(errors.ClientError) as busy:
                await models.generate_content(model="main_llm", contents="hi")
            with pytest.raises(errors.ClientError, match="nothing for the tool googleSearch"):
                await models.generate_content(model="main_llm", contents="hi", config=search)
        async with client(it, "no-key") as models:
            with pytest.raises(errors.ClientError) as refused:
                await models.generate_content(model="main_llm", contents="hi")
        assert (429, "RESOURCE_EXHAUSTED", "slow down") == (busy.value.code, busy.value.status, busy.value.message)
        assert (401, "UNAUTHENTICATED") == (refused.value.code, refused.value.status)
        (call,) = await it.calls(attempt_id)
    assert (429, "HTTP 429: slow down") == (call.status_code, call.error)


async def test_cut_stream_is_no_whole_answer(stage):
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        it.server.enqueue(Cut(after_chunks=3))
        async with client(it, token) as models:
            stream = await models.generate_content_stream(model="main_llm", contents="hi")
            with pytest.raises(httpx.RemoteProtocolError):
                _ = [piece async for piece in stream]
        (call,) = await it.calls(attempt_id)
    assert not call.is_complete


async def test_model_may_have_a_colon_in_its_name(stage):
    async with stage() as it:
        upstream = Upstream(name="qwen:7b", base_url=it.server.base_url, model="scripted")
        async with stage(upstreams=[upstream]) as named:
            _, token = await named.open_attempt()
            async with client(named, token) as models:
                assert (await models.generate_content(model="qwen:7b", contents="hi")).text


def translated_stream(chunks: list[Any], *, is_sse: bool = True) -> bytes:
    """Return the bytes that a client gets for the chunks of a chat completion."""
    stream = GoogleTranslation(model="m", is_streamed=True, is_sse=is_sse).stream()
    return stream.feed(b"".join(b"data: %b\n\n" % json.dumps(one).encode() for one in chunks)) + stream.end()


def chunk(index: int = 0, reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": index, "delta": delta, "finish_reason": reason}]}


CALL = {"index": 0, "id": "c1", "function": {"name": "add", "arguments": "{}"}}


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [chunk(content="one"), chunk(tool_calls=[CALL])],
        [chunk(content="one"), chunk(1, content="two"), chunk(reason="stop"), chunk(reason="stop")],
    ],
    ids=["empty", "call", "second-candidate"],
)
def test_stream_without_an_end_says_so(chunks: list[Any]):
    last = json.loads(translated_stream(chunks).split(b"data: ")[-1])
    assert (500, "the policy's stream ended before its answer did") == (last["error"]["code"], last["error"]["message"])
    assert last == json.loads(translated_stream(chunks, is_sse=False))[-1]


def test_stream_that_failed_says_only_why():
    found = json.loads(translated_stream([chunk(content="one"), {"error": {"message": "no memory"}}], is_sse=False))
    assert ["no memory"] == [one["error"]["message"] for one in found if "error" in one]


def test_thoughts_and_cached_tokens_are_counted_apart():
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 5},
    }
    body = json.dumps({"choices": [], "usage": usage}).encode()
    found = json.loads(GoogleTranslation(model="m", is_streamed=False, is_sse=False).answer(body))["usageMetadata"]
    expected = {"promptTokenCount": 9, "cachedContentTokenCount": 4, "thoughtsTokenCount": 5}
    assert {**expected, "candidatesTokenCount": 2, "totalTokenCount": 16} == found


async def test_client_that_cannot_carry_a_key_uses_the_path(stage):
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        base = f"{it.url}/rollout/{attempt_id.rpartition('.')[0]}/attempt/{attempt_id}/key/{token}"
        async with client(it, "none", base=base) as models:
            assert (await models.generate_content(model="main_llm", contents="hi")).text
        assert 1 == len(await it.calls(attempt_id))


def asked(**body: Any) -> dict[str, Any]:
    request = chat_request(Request("chat", json.dumps(body).encode()), model="m", is_streamed=False)
    return request.to_dict() or {}


def test_thoughts_media_and_nameless_calls_are_read():
    contents = [
        {"role": "user", "parts": [{"text": "look"}, {"inlineData": {"mimeType": "image/png", "data": "QUJD"}}]},
        {
            "role": "model",
            "parts": [
                {"text": "I should add", "thought": True},
                {"functionCall": {"name": "add", "args": {"a": 1}}},
                {"functionCall": {"name": "mul", "args": {}}},
            ],
        },
        {"role": "user", "parts": [{"functionResponse": {"name": "mul", "response": {"x": 2}}}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "add", "response": {"result": "1"}}}]},
    ]
    user, assistant, mul, add = messages_of({"contents": contents})
    assert "data:image/png;base64,QUJD" == user["content"][1]["image_url"]["url"]
    assert "I should add" == assistant["reasoning_content"]
    first, second = assistant["tool_calls"]
    assert [(second["id"], '{"x":2}'), (first["id"], "1")] == [(r["tool_call_id"], r["content"]) for r in (mul, add)]


def test_answer_format_and_choice_of_tools_are_read():
    schema = {"type": "OBJECT", "properties": {"type": {"type": "STRING"}}}
    body = asked(
        contents="hi",
        generationConfig={"responseMimeType": "application/json", "responseSchema": schema, "candidateCount": 2},
        tools=[{"functionDeclarations": [{"name": "a"}, {"name": "b"}]}],
        toolConfig={"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["b"]}},
    )
    read = {"type": "object", "properties": {"type": {"type": "string"}}}
    assert (2, read) == (body["n"], body["response_format"]["json_schema"]["schema"])
    assert ("required", ["b"]) == (body["tool_choice"], [one["function"]["name"] for one in body["tools"]])


ODD_PARTS = [None, 1, {"parts": 3}, {"parts": [None, {"functionCall": "x"}]}]


ODD_CHOICE = {
    "tools": [{"functionDeclarations": [{"name": "a"}]}],
    "toolConfig": {"functionCallingConfig": {"allowedFunctionNames": 5}},
}


@pytest.mark.parametrize("body", [{}, {"contents": 7}, {"contents": ODD_PARTS}, {"tools": 1}, ODD_CHOICE])
def test_odd_bodies_become_requests(body: Any):
    assert "m" == asked(**body)["model"]


def test_one_object_in_place_of_a_list_is_read():
    """Google's API accepts either form, and examples in its documentation use both."""
    body = asked(
        system_instruction={"parts": {"text": "be brief"}},
        contents={"role": "user", "parts": {"text": "hi"}},
        tools={"function_declarations": {"name": "add"}},
    )
    assert [("system", "be brief"), ("user", "hi")] == [(one["role"], one["content"]) for one in body["messages"]]
    assert ["add"] == [tool["function"]["name"] for tool in body["tools"]]


def test_media_of_a_functions_result_follow_it():
    image = {"inlineData": {"mimeType": "image/png", "data": "QUJD"}}
    result = {"name": "draw", "response": {"result": "drawn"}, "parts": [image]}
    parts = [{"functionResponse": result}, {"text": "nice?"}]
    drawn, user = messages_of({"contents": [{"role": "user", "parts": parts}]})
    assert ("tool", "drawn") == (drawn["role"], drawn["content"])
    assert "data:image/png;base64,QUJD" == user["content"][0]["image_url"]["url"]
    assert "nice?" == user["content"][1]["text"]


def test_schemas_are_read_at_every_depth_and_in_either_spelling():
    inner = {"type": "ARRAY", "min_items": 1, "items": {"type": "STRING"}}
    schema = {"type": "OBJECT", "additional_properties": inner, "properties": {"min_items": {"anyOf": [inner]}}}
    body = asked(contents="hi", tools=[{"functionDeclarations": [{"name": "a", "parameters": schema}]}])
    read = {"type": "array", "minItems": 1, "items": {"type": "string"}}
    expected = {"type": "object", "additionalProperties": read, "properties": {"min_items": {"anyOf": [read]}}}
    assert expected == body["tools"][0]["function"]["parameters"]
    closed = {"functionDeclarations": [{"name": "a", "parameters": {"additionalProperties": False}}]}
    assert {"additionalProperties": False} == asked(tools=[closed])["tools"][0]["function"]["parameters"]


PAPER = {"parts": [{"fileData": {"mimeType": "application/pdf", "fileUri": "https://example.com/a.pdf"}}]}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"cachedContent": "cachedContents/1"}, "cachedContent"),
        ({"cached_content": "cachedContents/1"}, "cachedContent"),
        ({"contents": [PAPER]}, "a file of type 'application/pdf' by its address"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "responseMimeType 'text/x.enum'"),
    ],
)
def test_requests_that_no_policy_can_answer_are_refused(body: dict[str, Any], named: str):
    with pytest.raises(Problem, match=f"nothing for {named}"):
        asked(**{"contents": "hi", **body})
