"""Fields that a provider needs in the next request are returned to it unchanged, whatever API the client uses.

Messages and deltas have the shapes that the providers' servers send; ids, texts and signatures are shortened.
"""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from agl.dialects import Request
from agl_gateway.wire.google import GoogleTranslation
from agl_gateway.wire.messages import MessagesTranslation
from agl_gateway.wire.responses import ResponsesTranslation
from agl_gateway.wire.thoughts import FIELDS, seal

from .test_hostile_streams import assert_linear

Json = dict[str, Any]

FUNCTION = {"name": "weather", "arguments": '{"city":"Paris"}'}
CALL: Json = {"id": "c1", "type": "function", "function": FUNCTION}
CLAUDE: Json = {"type": "reasoning.text", "format": "anthropic-claude-v1", "index": 0}
GPT: Json = {"format": "openai-responses-v1", "index": 0}
SUMMARY: Json = {"type": "reasoning.summary", **GPT}
ENCRYPTED: Json = {"type": "reasoning.encrypted", "data": "gAAAAABo", "id": "rs_1", **GPT}
SIGNED: Json = {"extra_content": {"google": {"thought_signature": "EocDCoQD"}}}
PARTS: list[Json] = [
    {"tool_calls": [{"index": 0, **CALL, "function": {"name": "weather", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": FUNCTION["arguments"]}}]},
]

PROVIDERS: dict[str, tuple[Json, list[Json]]] = {
    "vllm": (
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": [CALL],
            "reasoning": "I look it up.",
        },
        [{"role": "assistant", "content": ""}, {"reasoning": "I look "}, {"reasoning": "it up."}, *PARTS],
    ),
    "deepseek": (
        {"role": "assistant", "content": "Wait.", "reasoning_content": "I look it up.", "tool_calls": [CALL]},
        [
            {"role": "assistant", "content": None, "reasoning_content": ""},
            {"content": None, "reasoning_content": "I look "},
            {"content": None, "reasoning_content": "it up."},
            {"content": "Wait.", "reasoning_content": None},
            *PARTS,
        ],
    ),
    "openrouter-anthropic": (
        {
            "role": "assistant",
            "content": "Wait.",
            "refusal": None,
            "reasoning": "I look it up.",
            "reasoning_details": [{**CLAUDE, "text": "I look it up.", "signature": "EqoBCkgI"}],
            "tool_calls": [CALL],
        },
        [
            {
                "role": "assistant",
                "content": "",
                "reasoning": "I look ",
                "reasoning_details": [{**CLAUDE, "text": "I look "}],
            },
            {"content": "", "reasoning": "it up.", "reasoning_details": [{**CLAUDE, "text": "it up."}]},
            {"content": "", "reasoning": None, "reasoning_details": [{**CLAUDE, "signature": "EqoBCkgI"}]},
            {"content": "Wait.", "reasoning": None},
            *PARTS,
        ],
    ),
    "openrouter-openai": (
        {
            "role": "assistant",
            "content": None,
            "reasoning": "**Looking it up**",
            "reasoning_details": [{**SUMMARY, "summary": "**Looking it up**"}, ENCRYPTED],
            "tool_calls": [CALL],
        },
        [
            {"role": "assistant", "content": ""},
            {"content": "", "reasoning": "**Looking", "reasoning_details": [{**SUMMARY, "summary": "**Looking"}]},
            {"content": "", "reasoning": " it up**", "reasoning_details": [{**SUMMARY, "summary": " it up**"}]},
            *PARTS,
            {"role": "assistant", "content": "", "reasoning": None, "reasoning_details": [ENCRYPTED]},
        ],
    ),
    "openrouter-openai-without-a-summary": (
        {
            "role": "assistant",
            "content": "Wait.",
            "reasoning": None,
            "reasoning_details": [ENCRYPTED],
            "tool_calls": [CALL],
        },
        [{"role": "assistant", "content": "Wait."}, *PARTS, {"content": "", "reasoning_details": [ENCRYPTED]}],
    ),
    "gemini": (
        {"role": "assistant", "content": "Wait.", "tool_calls": [{**CALL, **SIGNED}, {**CALL, "id": "c2"}]},
        [
            {"role": "assistant", "content": "Wait."},
            {"tool_calls": [{"index": 0, **CALL, **SIGNED}, {"index": 1, **CALL, "id": "c2"}]},
        ],
    ),
    "mistral": (
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "I look it up."}]},
                {"type": "text", "text": "Wait."},
            ],
            "tool_calls": [CALL],
        },
        [
            {"role": "assistant", "content": ""},
            {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "I look "}]}]},
            {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "it up."}]}]},
            {"content": [{"type": "text", "text": "Wa"}]},
            {"content": "it."},
            *PARTS,
        ],
    ),
    "gemini-text": (
        {"role": "assistant", "content": "It is sunny.", **SIGNED},
        [{"role": "assistant", "content": "It is ", **SIGNED}, {"content": "sunny."}],
    ),
}


def body_of(message: Json) -> bytes:
    """Return a chat completion with this message."""
    return msgspec.json.encode({"id": "x", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


def stream_of(deltas: list[Json]) -> bytes:
    """Return a streamed chat completion with these deltas."""
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    return b"".join(b"data: %b\n\n" % msgspec.json.encode({"id": "x", "choices": [one]}) for one in choices)


def events_in(stream: bytes) -> list[Json]:
    return [json.loads(line[6:]) for line in stream.split(b"\n") if line.startswith(b"data: ")]


def messages_stored(data: bytes, *, is_streamed: bool) -> Json:
    """Return the next request of a client that does not keep the text of thinking."""
    if not is_streamed:
        blocks = json.loads(data)["content"]
    else:
        blocks = list[Json]()
        for event in events_in(data):
            delta = event.get("delta", {})
            if event["type"] == "content_block_start":
                blocks.append(event["content_block"])
            elif event["type"] == "content_block_delta":
                key = {"text_delta": "text", "input_json_delta": "partial_json"}.get(delta["type"], "signature")
                blocks[-1][key] = blocks[-1].get(key, "") + delta.get(key, "")
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block.pop("partial_json", "") or json.dumps(block["input"]))
    kept = [{**block, "thinking": ""} if block["type"] == "thinking" else block for block in blocks]
    return {"messages": [{"role": "assistant", "content": kept}, {"role": "user", "content": "?"}]}


def responses_stored(data: bytes, *, is_streamed: bool) -> Json:
    """Return the next request of a client that does not keep the text of reasoning."""
    if not is_streamed:
        output = json.loads(data)["output"]
    else:
        *events, last = events_in(data)
        output = last["response"]["output"]
        assert output == [event["item"] for event in events if event["type"] == "response.output_item.done"]
    kept = [{**item, "content": []} if item["type"] == "reasoning" else item for item in output]
    return {"input": [*kept, {"role": "user", "content": "?"}]}


def google_stored(data: bytes, *, is_streamed: bool) -> Json:
    """Return the next request of a client that does not keep thoughts, nor the ids of calls."""
    answers = events_in(data) if is_streamed else [json.loads(data)]
    parts = [part for one in answers for each in one["candidates"] for part in each["content"]["parts"]]
    for part in parts:
        part.get("functionCall", {}).pop("id", None)
    kept = [part for part in parts if not part.get("thought")]
    return {"contents": [{"role": "model", "parts": kept}, {"role": "user", "parts": [{"text": "?"}]}]}


def google() -> GoogleTranslation:
    return GoogleTranslation(model="m", is_streamed=True, is_sse=True)


APIS: dict[str, tuple[Callable[[], Any], Any, Callable[..., Json]]] = {
    "messages": (MessagesTranslation, "messages", messages_stored),
    "responses": (ResponsesTranslation, "responses", responses_stored),
    "google": (google, "chat", google_stored),
}


def sent_next(api: str, data: bytes, *, is_streamed: bool) -> Json:
    """Return the assistant message that the server gets with the request after an answer."""
    make, dialect, stored = APIS[api]
    translation = make()
    translation.asked(Request(dialect, b'{"model": "m"}'))
    if is_streamed:
        stream = translation.stream()
        told = b"".join(stream.feed(data[at : at + 11]) for at in range(0, len(data), 11)) + stream.end()
    else:
        told = translation.answer(data)
    following = {"model": "m", **stored(told, is_streamed=is_streamed)}
    (answer, _) = (make().asked(Request(dialect, msgspec.json.encode(following))).to_dict() or {})["messages"]
    return answer


@pytest.mark.parametrize("is_streamed", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_message_comes_back_with_the_fields_of_its_provider(provider: str, api: str, is_streamed: bool):
    message, deltas = PROVIDERS[provider]
    data = stream_of(deltas) if is_streamed else body_of(message)
    expected = {key: value for key, value in message.items() if value is not None or key == "content"}
    assert expected == sent_next(api, data, is_streamed=is_streamed)


ANNOTATED: Json = {
    "annotations": [{"type": "url_citation"}],
    "provider_specific_fields": {"a": 1},
    "name": "bot",
    "function_call": {"name": "f", "arguments": "{}"},
}


@pytest.mark.parametrize("is_streamed", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("api", APIS)
def test_other_fields_of_an_answer_do_not_come_back(api: str, is_streamed: bool):
    call, message = {"index": 0, **CALL, "provider_specific_fields": {"b": 1}}, {"role": "assistant", "content": "Hi."}
    given = {**message, **ANNOTATED, "tool_calls": [call]}
    data = stream_of([given]) if is_streamed else body_of(given)
    assert {**message, "tool_calls": [CALL]} == sent_next(api, data, is_streamed=is_streamed)


def with_seals(*sealed: Json) -> Request:
    """Return a request in the messages API with a call, and with seals that a client forged."""
    blocks: list[Json] = [{"type": "thinking", "thinking": "", "signature": seal({FIELDS: one})} for one in sealed]
    blocks.append({"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Paris"}})
    message = {"role": "assistant", "content": blocks}
    return Request("messages", msgspec.json.encode({"model": "m", "messages": [message, USER["messages"]]}))


def test_many_forged_seals_take_linear_time():
    def restore(seals: int) -> None:
        asked = with_seals({"a": [{"text": "a" * 800 * seals}]}, *[{"a": [{"text": "b"}]}] * seals)
        (answer, _) = (MessagesTranslation().asked(asked).to_dict() or {})["messages"]
        assert 1 + seals == len(answer["a"])

    assert_linear(restore, 1_250)  # not a copy of the text for each seal


@pytest.mark.parametrize("calls", [[{"id": {"a": 1}}], "text", [7], [{"id": []}, None]])
def test_odd_calls_in_a_forged_seal_are_ignored(calls: Any):
    (answer, _) = (MessagesTranslation().asked(with_seals({"tool_calls": calls})).to_dict() or {})["messages"]
    assert [CALL] == answer["tool_calls"]


UNSEALED: dict[str, Json] = {
    "messages": {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]}]},
    "responses": {"input": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}]},
    "google": {"contents": [{"role": "model", "parts": [{"text": "hm", "thought": True}]}]},
}
USER: dict[str, Json] = {
    "messages": {"role": "user", "content": "?"},
    "responses": {"role": "user", "content": "?"},
    "google": {"role": "user", "parts": [{"text": "?"}]},
}


@pytest.mark.parametrize("api", APIS)
def test_thoughts_without_a_seal_have_the_names_that_servers_read(api: str):
    make, dialect, _ = APIS[api]
    ((key, listed),) = UNSEALED[api].items()
    asked = make().asked(Request(dialect, msgspec.json.encode({"model": "m", key: [*listed, USER[api]]})))
    (answer, _) = (asked.to_dict() or {})["messages"]
    assert {"role": "assistant", "content": None, "reasoning": "hm", "reasoning_content": "hm"} == answer
