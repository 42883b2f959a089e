"""Reading and preparing model calls in every dialect: plain and streamed, whole, cut and unreadable."""

import base64
import hashlib
import tracemalloc
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl.dialects import Exchange, Request, call_messages, calls_of, dialect_of
from agl.schemas import unpack_floats, unpack_ids

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")


def encode(value) -> bytes:
    return msgspec.json.encode(value)


def asked(path, body: bytes) -> Request:
    dialect = dialect_of(path)
    assert dialect is not None
    return Request(dialect, body)


def exchange(path="/v1/chat/completions", *, request=None, response=b"", status=200, **fields) -> Exchange:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **(request or {})}
    data = response if isinstance(response, bytes) else encode(response)
    return Exchange(request=asked(path, encode(body)), request_id="r1", status=status, response=data, **fields)


def stream(*events, done=True) -> bytes:
    return b"".join(b"data: " + encode(event) + b"\n\n" for event in events) + (b"data: [DONE]\n\n" if done else b"")


def chat_chunk(index=0, *, delta=None, ids=None, logprobs=None, reason=None, **top):
    choice = {"index": index, "delta": delta or {}, "finish_reason": reason}
    if ids is not None:
        choice["token_ids"] = ids
    if logprobs is not None:
        choice["logprobs"] = {"content": [{"token": "t", "logprob": value} for value in logprobs]}
    return {"id": "c1", "object": "chat.completion.chunk", "model": "m", "choices": [choice], **top}


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/v1/chat/completions", "chat"),
        ("https://host/openai/v1/chat/completions?api-version=1", "chat"),
        ("/v1/completions/", "completions"),
        ("/rollout/r/attempt/a/key/k/v1/responses", "responses"),
        ("/v1/messages", "messages"),
        ("/v1/embeddings", "embeddings"),
        ("/v1/models", None),
        ("/v1/messages/count_tokens", None),
        ("", None),
    ],
)
def test_dialect_is_named_by_the_path(path, dialect):
    assert dialect == dialect_of(path)


def test_request_gives_single_fields_and_says_when_it_is_no_object():
    request = Request("chat", b'{"stream": true, "model": "m", "messages": [1], "n": null}')
    assert ("m", True, [1], None, None) == (
        request.model,
        request.get("stream"),
        request.get("messages"),
        request.get("n"),
        request.get("missing"),
    )
    assert {"stream": True, "model": "m", "messages": [1], "n": None} == request.to_dict()
    assert "" == Request("chat", b'{"model": 3}').model
    for body in (b"[1]", b"\xff", b"", b"null"):
        broken = Request("chat", body)
        assert (False, None, "", None) == (broken.is_object, broken.to_dict(), broken.model, broken.get("model"))
    assert (True, {}) == (Request("chat", b"{}").is_object, Request("chat", b"{}").to_dict())


def test_request_with_one_unreadable_field_still_gives_the_others():
    request = Request("chat", b'{"model": "m", "user": "\xff"}')
    assert ("m", None, None) == (request.model, request.get("user"), request.to_dict())


@pytest.mark.long
@settings(max_examples=200)
@given(
    body=st.dictionaries(
        st.text(max_size=5), st.recursive(st.none() | st.integers(-9, 9) | st.text(max_size=5), st.lists, max_leaves=9)
    )
)
def test_request_reads_what_a_json_parser_reads(body):
    assert body == Request("chat", encode(body)).to_dict()


def test_prepare_leaves_bodies_alone_that_need_no_change():
    body = b'{ "model":"m",  "n":1 }'
    assert body is Request("chat", body).prepared(want_ids=False)
    assert body is Request("chat", body).prepared(want_ids=False, model="m")
    assert b"no json" == Request("chat", b"no json").prepared(want_ids=True, model="m")


def test_prepare_asks_for_ids_and_names_the_backends_model_keeping_other_bytes():
    body = b'{"model":"policy","temperature":1.0,"messages":[{"role":"user","content":"\\u00e4 1e5"}],"x":1e400}'
    request = Request("chat", body)
    assert ["user"] == [message["role"] for message in request.get("messages")]
    prepared = request.prepared(want_ids=True, model="real")
    assert b'"content":"\\u00e4 1e5"' in prepared
    assert b'"temperature":1.0' in prepared
    assert b'"model":"real"' in prepared
    for field in (b'"return_token_ids":true', b'"logprobs":true'):
        assert field in prepared


def test_prepare_keeps_what_the_client_asked_for():
    def prepared(dialect, body):
        return msgspec.json.decode(Request(dialect, body).prepared(want_ids=True))

    assert 5 == prepared("completions", b'{"logprobs":5}')["logprobs"]
    assert 1 == prepared("completions", b"{}")["logprobs"]
    responses = prepared("responses", b'{"include":["x"]}')
    assert ["x", "message.output_text.logprobs"] == responses["include"]
    assert responses["enable_response_messages"]
    assert {"input": "x"} == prepared("embeddings", b'{"input":"x"}')


@pytest.mark.parametrize(
    ("top", "choice"),
    [
        ({"prompt_token_ids": [1, 2]}, {"token_ids": [3, 4]}),
        ({}, {"prompt_token_ids": [1, 2], "response_token_ids": [3, 4]}),
        ({}, {"prompt_token_ids": [1, 2], "token_ids": [3, 4]}),
    ],
    ids=["vllm", "sglang", "in-choice"],
)
def test_chat_ids_are_found_wherever_the_backend_puts_them(top, choice):
    logprobs = {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1}]}
    message = {"role": "assistant", "content": "ab"}
    body = {
        "id": "c1",
        **top,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": logprobs, **choice}],
    }
    (call,) = calls_of(exchange(response=body), policy="p", model_version="7")
    assert ([1, 2], [3, 4], [-0.5, -1.0]) == (
        unpack_ids(call.prompt_ids),
        unpack_ids(call.response_ids),
        unpack_floats(call.logprobs),
    )
    assert ("", "stop", "p", "7") == (call.ids_missing, call.finish_reason, call.policy, call.model_version)
    assert {"id": "c1", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]} == call.response


@pytest.mark.parametrize(
    ("fields", "version"),
    [
        ({"model_version": "v3"}, "v3"),
        ({"model_versions": [{"version": "a", "start": 0, "end": 2}, {"version": "b", "start": 2, "end": 3}]}, "a+b"),
        ({"weight_versions": [{"version": 4, "start": 0, "end": 3}]}, "4"),
        ({}, "given"),
    ],
)
def test_version_is_the_backends_word_before_the_gateways(fields, version):
    body = {**fields, "choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}]}
    (call,) = calls_of(exchange(response=body), model_version="given")
    assert version == call.model_version


def test_chat_stream_is_assembled_with_tool_calls_ids_and_usage():
    first = {"index": 0, "id": "t1", "type": "function", "function": {"name": "add", "arguments": ""}}
    body = stream(
        chat_chunk(delta={"role": "assistant", "content": ""}, prompt_token_ids=[9, 8]),
        chat_chunk(delta={"content": "hel"}, ids=[1], logprobs=[-1]),
        chat_chunk(delta={"content": "lo"}, ids=[2], logprobs=[-2]),
        chat_chunk(delta={"tool_calls": [first]}, ids=[3], logprobs=[-3]),
        chat_chunk(delta={"tool_calls": [{"index": 1, "id": "t2", "function": {"name": "sub", "arguments": "{}"}}]}),
        chat_chunk(delta={"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}, ids=[4], logprobs=[-4]),
        chat_chunk(delta={"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]}, ids=[5], logprobs=[-5]),
        chat_chunk(reason="tool_calls", model_version="v2"),
        {"id": "c1", "choices": [], "usage": {"prompt_tokens": 2}},
    )
    (call,) = calls_of(exchange(response=body, is_streamed=True))
    assert [9, 8] == unpack_ids(call.prompt_ids)
    assert [1, 2, 3, 4, 5] == unpack_ids(call.response_ids)
    assert [-1, -2, -3, -4, -5] == unpack_floats(call.logprobs)
    assert ("v2", "tool_calls", "", True) == (
        call.model_version,
        call.finish_reason,
        call.ids_missing,
        call.is_complete,
    )
    assert {"prompt_tokens": 2} == call.response["usage"]
    message = call.response["choices"][0]["message"]
    assert "hello" == message["content"]
    assert [("t1", "add", '{"a":1}'), ("t2", "sub", "{}")] == [
        (item["id"], item["function"]["name"], item["function"]["arguments"]) for item in message["tool_calls"]
    ]


def test_stream_of_several_choices_is_told_apart():
    body = stream(
        chat_chunk(0, delta={"content": "a"}, ids=[1], logprobs=[-1], prompt_token_ids=[7]),
        chat_chunk(1, delta={"content": "x"}, ids=[4], logprobs=[-4]),
        chat_chunk(0, delta={"content": "b"}, ids=[2], logprobs=[-2], reason="stop"),
        chat_chunk(1, delta={"content": "y"}, ids=[5], logprobs=[-5], reason="length"),
    )
    first, second = calls_of(exchange(request={"n": 2}, response=body, is_streamed=True))
    assert ([1, 2], [4, 5]) == (unpack_ids(first.response_ids), unpack_ids(second.response_ids))
    assert ((0, 2, "stop"), (1, 2, "length")) == (
        (first.choice, first.choices, first.finish_reason),
        (second.choice, second.choices, second.finish_reason),
    )
    assert [7] == unpack_ids(first.prompt_ids) == unpack_ids(second.prompt_ids)


@pytest.mark.parametrize(
    ("events", "done", "is_complete"),
    [
        ((chat_chunk(delta={"content": "a"}),), False, False),
        ((chat_chunk(delta={"content": "a"}), chat_chunk(reason="stop")), False, True),
        ((chat_chunk(delta={"content": "a"}),), True, True),
    ],
)
def test_stream_is_complete_only_when_its_end_was_seen(events, done, is_complete):
    body = stream(*events, done=done)
    (call,) = calls_of(exchange(response=body, is_streamed=True, is_complete=False))
    assert is_complete == call.is_complete
    assert is_complete == (call.error == "")


@pytest.mark.parametrize(("size", "newline"), [(1, b"\n"), (1, b"\r\n"), (3 << 20, b"\n")])
def test_long_stream_is_read_with_little_more_memory_than_its_bytes_and_its_text(size, newline):
    deltas = [chat_chunk(delta={"content": "a"})] * 12_000
    large = chat_chunk(delta={"content": "b" * size})
    body = stream(*deltas, large, *deltas, chat_chunk(reason="stop")).replace(b"\n", newline)
    tracemalloc.start()
    try:
        (call,) = calls_of(exchange(response=body, is_streamed=True))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "a" * 12_000 + "b" * size + "a" * 12_000 == call.response["choices"][0]["message"]["content"]
    assert (True, "stop") == (call.is_complete, call.finish_reason)
    assert peak < 2 * len(body) + 4 * size + (4 << 20)


def test_broken_event_in_a_stream_costs_only_itself():
    body = b"data: {broken\n\n: comment\n\n" + stream(chat_chunk(delta={"content": "a"}, reason="stop"))
    (call,) = calls_of(exchange(response=body.replace(b"\n", b"\r\n"), is_streamed=True))
    assert "a" == call.response["choices"][0]["message"]["content"]
    assert call.is_complete


def test_error_in_a_stream_is_recorded():
    body = stream(chat_chunk(delta={"content": "a"}), {"error": {"message": "out of memory"}}, done=False)
    (call,) = calls_of(exchange(response=body, is_streamed=True))
    assert "out of memory" == call.error
    assert not call.is_complete


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({}, "returned no token ids"),
        ({"prompt_token_ids": [1]}, "not the response's"),
        ({"token_ids": [1]}, "not the prompt's"),
        ({"prompt_token_ids": [1], "token_ids": [1]}, "without log-probabilities"),
        (
            {"prompt_token_ids": [1], "token_ids": [1, 2], "logprobs": {"content": [{"logprob": -1}]}},
            "1 log-probabilities for 2 response tokens",
        ),
        (
            {"prompt_token_ids": [1], "token_ids": [2**40], "logprobs": {"content": [{"logprob": -1}]}},
            "not 32-bit integers",
        ),
    ],
)
def test_missing_ids_say_why(choice, reason):
    body = {"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop", **choice}]}
    (call,) = calls_of(exchange(response=body))
    assert reason in call.ids_missing


def test_lengths_that_differ_keep_ids_and_logprobs():
    choice = {"prompt_token_ids": [1], "token_ids": [1, 2], "logprobs": {"content": [{"logprob": -1}]}}
    body = {"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop", **choice}]}
    (call,) = calls_of(exchange(response=body))
    assert ([1, 2], [-1.0]) == (unpack_ids(call.response_ids), unpack_floats(call.logprobs))


def test_ids_that_nobody_asked_for_are_not_called_missing_by_the_backend():
    body = {"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}]}
    (call,) = calls_of(exchange(response=body), want_ids=False)
    assert "not asked for" in call.ids_missing


@pytest.mark.parametrize(
    ("response", "status", "fields", "error"),
    [
        ({"error": {"message": "slow down"}}, 429, {}, "HTTP 429: slow down"),
        ({"type": "error", "error": {"type": "x", "message": "overloaded"}}, 529, {}, "HTTP 529: overloaded"),
        ({"detail": "gone"}, 404, {}, "HTTP 404: gone"),
        (b"<html>bad gateway", 502, {}, "HTTP 502: <html>bad gateway"),
        (b"", 0, {"error": "refused"}, "no response: refused"),
        (b"", 200, {}, "empty body"),
        (b"<html>", 200, {}, "not what the API promises"),
        (b'{"choices": [', 200, {"is_complete": False}, "cut after 13 bytes"),
        (b"{}", 200, {}, "holds no choice"),
        ({"error": {"message": "bad key sk-0123456789abcdefghij"}}, 401, {}, "HTTP 401: bad key sk-***"),
    ],
)
def test_failures_become_one_call_that_says_what_happened(response, status, fields, error):
    (call,) = calls_of(exchange(response=response, status=status, **fields))
    assert error in call.error
    assert "no answer" in call.ids_missing
    assert status == call.status_code
    assert "0123456789abcdefghij" not in repr(call)


def test_secrets_in_request_bodies_are_not_recorded():
    request = {
        "api_key": "hush-1",
        "tools": [{"type": "mcp", "authorization": "hush-2", "name": "t"}, {"type": "function"}],
        "mcp_servers": [{"url": "u", "authorization_token": "hush-3"}],
    }
    (call,) = calls_of(exchange(request=request, response=b""))
    assert "hush" not in repr(call)
    assert [{"type": "mcp", "name": "t"}, {"type": "function"}] == call.request["tools"]


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/v1/chat/completions", {"type": "image_url", "image_url": {"url": "data:image/png;base64,{data}"}}),
        ("/v1/responses", {"type": "input_image", "image_url": "data:image/png;base64,{data}"}),
        (
            "/v1/messages",
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "{data}"}},
        ),
        ("/v1/chat/completions", {"type": "input_audio", "input_audio": {"data": "{data}", "format": "wav"}}),
    ],
)
def test_payloads_are_replaced_by_their_digest(path, content):
    payload = bytes(range(256)) * 4
    data = base64.b64encode(payload).decode()
    part = msgspec.json.decode(encode(content).replace(b"{data}", data.encode()))
    message = {"role": "user", "content": [{"type": "text", "text": "what?"}, part]}
    key = "input" if path.endswith("responses") else "messages"
    (call,) = calls_of(exchange(path, request={key: [message]}, response=b""))
    assert (f"sha256:{hashlib.sha256(payload).hexdigest()}",) == call.inputs
    assert data not in repr(call)


def test_urls_of_media_are_references_and_text_is_none():
    parts = [{"type": "text", "text": "an image of a file"}, {"type": "image_url", "image_url": {"url": "http://x/y"}}]
    (call,) = calls_of(exchange(request={"messages": [{"role": "user", "content": parts}]}))
    assert ("http://x/y",) == call.inputs
    (plain,) = calls_of(exchange(request={"messages": [{"role": "user", "content": parts[:1]}]}))
    assert () == plain.inputs


def test_sampling_is_read_from_every_dialects_names():
    request = {"temperature": 1, "top_p": 0.9, "max_completion_tokens": 7, "stop": "x", "seed": True}
    (call,) = calls_of(exchange(request=request))
    assert (1.0, 0.9, 7, ("x",), None) == (
        call.sampling.temperature,
        call.sampling.top_p,
        call.sampling.max_tokens,
        call.sampling.stop,
        call.sampling.seed,
    )
    assert call.sampling.changes_distribution
    (other,) = calls_of(exchange("/v1/messages", request={"max_tokens": 5, "stop_sequences": ["a", "b"]}))
    assert (5, ("a", "b"), False) == (
        other.sampling.max_tokens,
        other.sampling.stop,
        other.sampling.changes_distribution,
    )


def test_embeddings_are_recorded_without_their_vectors():
    body = {"data": [{"embedding": [0.1]}], "usage": {"prompt_tokens": 3}}
    (call,) = calls_of(exchange("/v1/embeddings", request={"input": "x"}, response=body))
    assert {"usage": {"prompt_tokens": 3}} == call.response
    assert "sample no tokens" in call.ids_missing
    assert call.error == ""


def test_responses_stream_that_is_cut_keeps_the_items_so_far():
    body = b"".join(
        b"event: x\ndata: " + encode(event) + b"\n\n"
        for event in (
            {"type": "response.created", "response": {"id": "r", "status": "in_progress", "output": []}},
            {"type": "response.output_item.added", "output_index": 0, "item": {"type": "message", "content": []}},
            {"type": "response.output_text.delta", "output_index": 0, "delta": "he"},
            {"type": "response.output_text.delta", "output_index": 0, "delta": "llo"},
            {"type": "response.output_item.added", "output_index": 1, "item": {"type": "function_call", "name": "f"}},
            {"type": "response.function_call_arguments.delta", "output_index": 1, "delta": '{"a'},
        )
    )
    (call,) = calls_of(exchange("/v1/responses", response=body, is_streamed=True, is_complete=False))
    assert not call.is_complete
    text, function = call.response["output"]
    assert ("hello", '{"a') == (text["content"][0]["text"], function["arguments"])


def test_messages_stream_with_tool_use_and_thinking_is_assembled():
    start = {"type": "message_start", "message": {"id": "m", "content": [], "usage": {"input_tokens": 3}}}
    tool = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    events = [
        start,
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
        {"type": "content_block_start", "index": 1, "content_block": tool},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"a":'}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": "1}"}},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 9}},
        {"type": "message_stop"},
    ]
    (call,) = calls_of(exchange("/v1/messages", response=stream(*events, done=False), is_streamed=True))
    assert call.is_complete
    assert ("tool_use", {"input_tokens": 3, "output_tokens": 9}) == (call.finish_reason, call.response["usage"])
    assert [{"type": "thinking", "thinking": "hm"}, {**tool, "input": {"a": 1}}] == call.response["content"]
    assert "Anthropic messages format has none" in call.ids_missing


def test_conversations_of_all_dialects_become_the_same_chat_messages():
    tool_call = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    expected = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [tool_call]},
        {"role": "tool", "tool_call_id": "t1", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    (chat,) = calls_of(
        exchange(
            request={"messages": expected[:-1]},
            response={"choices": [{"index": 0, "message": expected[-1], "finish_reason": "stop"}]},
        )
    )
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "1+1?"}]},
        {"type": "function_call", "call_id": "t1", "name": "add", "arguments": '{"a":1}'},
        {"type": "function_call_output", "call_id": "t1", "output": "2"},
    ]
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}]}
    (responses,) = calls_of(
        exchange(
            "/v1/responses",
            request={"instructions": "be brief", "input": items},
            response={"status": "completed", "output": [{"type": "reasoning"}, answer]},
        )
    )
    blocks = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "2"}]},
    ]
    (messages,) = calls_of(
        exchange(
            "/v1/messages",
            request={"system": "be brief", "messages": blocks},
            response={"content": [{"type": "text", "text": "two"}], "stop_reason": "end_turn"},
        )
    )
    for call in (chat, responses, messages):
        assert expected == call_messages(call)


def test_completions_become_a_user_and_an_assistant_message():
    body = {"choices": [{"index": 0, "text": "two", "finish_reason": "stop"}]}
    (call,) = calls_of(exchange("/v1/completions", request={"prompt": "1+1="}, response=body))
    assert [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "two"}] == call_messages(call)


@settings(max_examples=200)
@given(
    path=st.sampled_from(PATHS),
    request=st.binary(max_size=60),
    response=st.binary(max_size=200),
    status=st.sampled_from([0, 200, 400, 500]),
    is_streamed=st.booleans(),
)
def test_any_bytes_give_at_least_one_call_and_never_an_exception(path, request, response, status, is_streamed):
    calls = calls_of(
        Exchange(
            request=asked(path, request), request_id="r", status=status, response=response, is_streamed=is_streamed
        )
    )
    assert calls
    for call in calls:
        assert call.ids_missing
        call_messages(call)


KEYS = [
    "choices",
    "message",
    "delta",
    "index",
    "content",
    "output",
    "type",
    "item",
    "output_index",
    "logprobs",
    "token_ids",
    "error",
    "usage",
    "response",
    "tool_calls",
    "function",
    "text",
    "tokens",
    "input_messages",
    "output_messages",
    "model_versions",
    "prompt",
    "messages",
    "input",
    "content_block",
    "prompt_token_ids",
    "partial_json",
    "role",
    "source",
    "image_url",
    "url",
    "arguments",
    "system",
]
WORDS = [
    "message_start",
    "content_block_start",
    "content_block_delta",
    "text_delta",
    "input_json_delta",
    "thinking_delta",
    "message_delta",
    "message_stop",
    "error",
    "response.created",
    "response.output_item.added",
    "response.output_text.delta",
    "response.completed",
    "message",
    "response.function_call_arguments.delta",
    "function_call",
    "image_url",
    "image",
    "text",
    "tool_use",
    "tool_result",
    "data:x,!!",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.just(2.5) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6),
    max_leaves=25,
)


@pytest.mark.long
@settings(max_examples=500)
@given(path=st.sampled_from(PATHS), request=JSON, response=JSON, is_streamed=st.booleans())
def test_any_json_gives_at_least_one_call_and_never_an_exception(path, request, response, is_streamed):
    events = response if isinstance(response, list) else [response]
    data = stream(*events) if is_streamed else encode(response)
    calls = calls_of(
        Exchange(
            request=asked(path, encode(request)), request_id="r", status=200, response=data, is_streamed=is_streamed
        )
    )
    assert calls
    for call in calls:
        call_messages(call)
        msgspec.msgpack.encode(call)


@settings(max_examples=100)
@given(ids=st.lists(st.integers(0, 2**31 - 1), max_size=40), cuts=st.lists(st.integers(0, 40), max_size=6))
def test_ids_are_the_same_however_a_stream_is_cut_into_deltas(ids, cuts):
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    parts = [ids[start:stop] for start, stop in pairwise(bounds)]
    chunks = [chat_chunk(delta={"content": "x"}, ids=part, logprobs=[-1.0] * len(part)) for part in parts]
    chunks[0]["prompt_token_ids"] = [5]
    (call,) = calls_of(exchange(response=stream(*chunks, chat_chunk(reason="stop")), is_streamed=True))
    assert ids == unpack_ids(call.response_ids)
    assert len(ids) == len(unpack_floats(call.logprobs))
    assert "" == call.ids_missing


def test_a_stream_that_was_read_to_its_last_event_is_whole_whatever_broke_afterwards():
    event = {"id": "c", "choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}]}
    body = b"data: " + msgspec.json.encode(event) + b"\n\ndata: [DONE]\n\n"
    exchange = Exchange(
        request=Request("chat", b'{"model": "m", "messages": [], "stream": true}'),
        request_id="r",
        status=200,
        response=body,
        is_streamed=True,
        is_complete=False,
        latency_s=1.0,
        first_token_s=1.0,
        error="the client closed the connection before the answer ended",
    )
    (whole,) = calls_of(exchange)
    (cut,) = calls_of(
        msgspec.structs.replace(exchange, response=body.replace(b'"stop"', b"null").split(b"data: [D")[0])
    )
    assert (True, "") == (whole.is_complete, whole.error)
    assert (False, exchange.error) == (cut.is_complete, cut.error)
