"""The span recorder: order, bound, and no loss."""

import threading
from collections.abc import Sequence

import pytest

from agl.schemas import Span
from agl.tracing import SpanRecorder


def span(number: int) -> Span:
    return Span(rollout_id="ro-1", attempt_id="ro-1.1", span_id=f"{number:016x}", name="step")


def test_recorder_drains_in_order_and_once():
    recorder = SpanRecorder()
    for number in range(3):
        recorder.record(span(number))
    assert len(recorder) == 3
    assert [span(0), span(1), span(2)] == recorder.drain()
    assert recorder.drain() == []


def test_recorder_spills_everything_at_its_bound():
    spilled: list[Span] = []
    recorder = SpanRecorder(bound=2, spill=spilled.extend)
    for number in range(5):
        recorder.record(span(number))
    assert [span(number) for number in range(4)] == spilled
    assert recorder.spilled == 4
    assert [span(4)] == recorder.drain()


def test_recorder_without_spill_grows_beyond_its_bound():
    recorder = SpanRecorder(bound=2)
    for number in range(5):
        recorder.record(span(number))
    assert len(recorder.drain()) == 5
    assert recorder.spilled == 0


def test_recorder_keeps_what_could_not_be_spilled(caplog: pytest.LogCaptureFixture):
    def broken(spans: Sequence[Span]) -> None:
        raise OSError("disk full")

    recorder = SpanRecorder(bound=2, spill=broken)
    for number in range(3):
        recorder.record(span(number))
    assert [span(0), span(1), span(2)] == recorder.drain()
    assert "disk full" in caplog.text


def test_recorder_loses_nothing_under_threads():
    spilled: list[Span] = []
    recorder = SpanRecorder(bound=7, spill=spilled.extend)

    def work(first: int) -> None:
        for number in range(first, first + 500):
            recorder.record(span(number))

    threads = [threading.Thread(target=work, args=(500 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = sorted(one.span_id for one in [*spilled, *recorder.drain()])
    assert [f"{number:016x}" for number in range(2000)] == found
