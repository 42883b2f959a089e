"""Tool calls in the deltas of servers that number them, give all the same number, or give none."""

from typing import Any

import pytest

from agl.dialects import StreamedCalls

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
