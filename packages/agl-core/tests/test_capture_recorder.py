"""The span recorder keeps the order of spans and loses none."""

import threading

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


def test_recorder_loses_nothing_under_threads():
    recorder, drained = SpanRecorder(), list[Span]()

    def work(first: int) -> None:
        for number in range(first, first + 500):
            recorder.record(span(number))

    threads = [threading.Thread(target=work, args=(500 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        drained += recorder.drain()
    found = sorted(one.span_id for one in [*drained, *recorder.drain()])
    assert [f"{number:016x}" for number in range(2000)] == found
