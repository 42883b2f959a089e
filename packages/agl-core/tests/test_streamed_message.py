"""Messages from their deltas: tool calls with or without numbers, and lists whose entries arrive in parts."""

import time
from typing import Any

import pytest

from agl.dialects import StreamedCalls, StreamedMessage

WEATHER, CLOCK = ("weather", '{"city": "Paris"}'), ("clock", '{"tz": "JST"}')


def part(index: int | None, call_id: str, name: str, arguments: str, **more: Any) -> dict[str, Any]:
    fields = {"index": index, "id": call_id, "type": "function", **more}
    function = {"name": name, "arguments": arguments}
    return {key: value for key, value in fields.items() if value not in (None, "")} | {
        "function": {key: value for key, value in function.items() if value}
    }


@pytest.mark.parametrize(
    "deltas",
    [
        [[part(0, "c1", *WEATHER)], [part(1, "c2", *CLOCK)]],
        [[part(0, "c1", *WEATHER)], [part(0, "c2", *CLOCK)]],
        [[part(None, "c1", *WEATHER)], [part(None, "c2", *CLOCK)]],
        [[part(None, "c1", *WEATHER), part(None, "c2", *CLOCK)]],
        [
            [part(0, "c1", "weather", ""), part(0, "", "", '{"city": ')],
            [part(0, "", "", '"Paris"}'), part(1, "c2", *CLOCK)],
        ],
        [[part(0, "c1", "weather", '{"city": ')], [part(0, "c1", "weather", '"Paris"}')], [part(0, "c2", *CLOCK)]],
        [
            [part(1, "c2", "clock", ""), part(0, "c1", "weather", "")],
            [part(0, "", "", WEATHER[1]), part(1, "", "", CLOCK[1])],
        ],
        [[part(None, "c1", "weather", '{"city": ')], [part(None, "", "", '"Paris"}')], [part(None, "c2", *CLOCK)]],
    ],
    ids=["numbered", "one-index", "no-index", "one-delta", "index-twice", "name-repeated", "mixed", "parts"],
)
def test_parallel_calls_stay_apart(deltas: list[list[dict[str, Any]]]) -> None:
    calls = StreamedCalls()
    for parts in deltas:
        calls.add(parts)

    assert [("c1", *WEATHER), ("c2", *CLOCK)] == [
        (call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls.whole()
    ]


@pytest.mark.parametrize("index", [0, None])
def test_calls_without_ids_are_parted_where_one_is_complete(index: int | None) -> None:
    calls = StreamedCalls()
    for name, arguments in (WEATHER, CLOCK, CLOCK):
        calls.add([part(index, "", name, arguments)])

    assert ["weather", "clock", "clock"] == [call["function"]["name"] for call in calls.whole()]


def test_fields_of_a_provider_are_kept() -> None:
    calls = StreamedCalls()
    calls.add([part(0, "c1", *WEATHER, extra_content={"google": {"thought_signature": "SIG"}})])

    assert {"google": {"thought_signature": "SIG"}} == calls.whole()[0]["extra_content"]


@pytest.mark.parametrize("garbage", [None, "text", [1, None], [{}], [{"function": 7}], [{"function": {"name": 3}}]])
def test_garbage_makes_no_error(garbage: Any) -> None:
    calls = StreamedCalls()
    calls.add(garbage)

    assert all({"name": "", "arguments": ""} == call["function"] for call in calls.whole())


CLAUDE = {"type": "reasoning.text", "index": 0}
CITATION = {"type": "url_citation", "url_citation": {"url": "https://example.com/a"}}
OTHER = {"type": "url_citation", "url_citation": {"url": "https://example.com/b"}}


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        (
            [{**CLAUDE, "text": "I look "}, {**CLAUDE, "text": "it up."}, {**CLAUDE, "text": None, "signature": "Eq"}],
            [{**CLAUDE, "text": "I look it up.", "signature": "Eq"}],
        ),
        (
            [{**CLAUDE, "text": "a"}, {**CLAUDE, "index": 1, "text": "b"}, {**CLAUDE, "text": "c"}],
            [{**CLAUDE, "text": "ac"}, {**CLAUDE, "index": 1, "text": "b"}],
        ),
        (
            [{"type": "thinking", "thinking": "a", "signature": "s"}, {"type": "thinking", "thinking": "b"}],
            [{"type": "thinking", "thinking": "a", "signature": "s"}, {"type": "thinking", "thinking": "b"}],
        ),
        ([CITATION, OTHER], [CITATION, OTHER]),
        ([1, None, {**CLAUDE, "text": 2}], [1, None, {**CLAUDE, "text": 2}]),
    ],
    ids=["signed", "two at once", "signature ends an entry", "whole entries", "odd"],
)
def test_entries_of_lists_are_joined_from_their_parts(parts: list[Any], whole: list[Any]):
    message = StreamedMessage()
    for one in parts:
        message.add({"reasoning_details": [one]})
    assert {"reasoning_details": whole} == message.whole()


def test_entries_that_arrive_together_stay_apart():
    message, entries = StreamedMessage(), [{"type": "reasoning.summary", "summary": text} for text in "ab"]
    message.add({"reasoning_details": entries})
    assert {"reasoning_details": entries} == message.whole()


def test_content_in_parts_and_text_is_joined_in_parts():
    message = StreamedMessage()
    for text in ("I look ", "it up."):
        message.add({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": text}]}]})
    message.add({"content": "It is "})
    message.add({"content": "sunny."})
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "I look it up."}]}
    assert {"content": [thinking, {"type": "text", "text": "It is sunny."}]} == message.whole()


def test_content_that_turns_from_text_into_parts_is_kept():
    message, reference = StreamedMessage(), {"type": "reference", "reference_ids": [1]}
    for content in ("Hello ", "you.", [reference]):
        message.add({"role": "assistant", "content": content})
    assert [{"type": "text", "text": "Hello you."}, reference] == message.whole()["content"]


@pytest.mark.parametrize("field", ["text", "summary", "thinking"])
def test_growth_of_a_large_entry_takes_linear_time(field: str):
    # A copy of the entry for each part would copy 100 GB, which takes more than 10 s on any machine.
    started = time.process_time()
    message = StreamedMessage()
    for text in ("a" * 5_000_000, *("b" * 20_000)):
        message.add({"reasoning_details": [{"type": "reasoning.text", field: text}]})
    assert 5_020_000 == len(message.whole()["reasoning_details"][0][field])
    assert time.process_time() - started < 5


def test_growth_of_a_calls_arguments_takes_linear_time():
    started = time.process_time()
    calls = StreamedCalls()
    for arguments in ("a" * 5_000_000, *("b" * 20_000)):
        calls.add([{"index": 0, "id": "c1", "function": {"arguments": arguments}}])
    assert 5_020_000 == len(calls.whole()[0]["function"]["arguments"])
    assert time.process_time() - started < 5
