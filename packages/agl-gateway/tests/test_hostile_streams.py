"""The time to translate and record a stream grows with its size, not with the square of its size."""

import time
from collections.abc import Callable
from typing import Any

from agl.dialects import Exchange, Request, calls_of
from agl.schemas import Dialect
from agl_gateway.wire.thoughts import SealedMessages
from agl_gateway.wire.translation import EventSplitter, named_event

GROWTH = 4
MOST = 2.5 * GROWTH
"""Linear work takes 4 times as long for 4 times the input, quadratic work 16 times."""


def best_s(work: Callable[[], object]) -> float:
    """Return the processor time of the fastest of three runs."""
    taken: list[float] = []
    for _ in range(3):
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return min(taken)


def assert_linear(work: Callable[[int], object], size: int) -> None:
    small_s, large_s = best_s(lambda: work(size)), best_s(lambda: work(GROWTH * size))
    assert large_s <= MOST * small_s


def test_large_event_in_small_chunks_is_read_in_linear_time():
    def split(chunks: int) -> None:
        events = EventSplitter()
        for _ in range(chunks):
            assert not events.feed(b"data: " + b"x" * 93 + b"\n")
        assert [chunks * 100 - 1] == [len(event) for event in events.feed(b"\n")]

    assert_linear(split, 5_000)


def thinking_events(deltas: int, text: str) -> list[bytes]:
    delta = {"type": "thinking_delta", "thinking": text}
    return [
        named_event({"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}}),
        *[named_event({"type": "content_block_delta", "index": 0, "delta": delta})] * deltas,
        named_event({"type": "content_block_stop", "index": 0}),
        named_event({"type": "message_stop"}),
    ]


def test_thoughts_are_sealed_in_linear_time():
    def seal(deltas: int) -> None:
        stream = SealedMessages().stream()
        assert b"signature_delta" in b"".join(stream.feed(event) for event in thinking_events(deltas, "x" * 500))

    assert_linear(seal, 2_000)


def test_messages_and_responses_are_recorded_in_linear_time():
    def record(deltas: int) -> None:
        message = {"type": "message_start", "message": {"type": "message", "content": []}}
        body = b"".join([named_event(message), *thinking_events(deltas, "so " * 1_000)])
        assert deltas * 3_000 == len(read("messages", body)["content"][0]["thinking"])
        item = {"type": "message", "content": [{"type": "output_text", "text": ""}]}
        delta = {"type": "response.output_text.delta", "output_index": 0, "delta": "so " * 1_000}
        events = [
            {"type": "response.created", "response": {"output": []}},
            {"type": "response.output_item.added", "output_index": 0, "item": item},
            *[delta] * deltas,
        ]
        found = read("responses", b"".join(map(named_event, events)))
        assert deltas * 3_000 == len(found["output"][0]["content"][0]["text"])

    assert_linear(record, 400)


def read(dialect: Dialect, body: bytes) -> Any:
    """Return the recorded answer of a stream that was cut."""
    request = Request(dialect, b"{}")
    (call,) = calls_of(
        Exchange(request=request, request_id="r", status=200, response=body, is_streamed=True, is_complete=False)
    )
    return call.response
