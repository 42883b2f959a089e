"""What the adapters' benchmarks share: the same framework code bare and inside an observed rollout."""

from collections.abc import Callable

from agl.capture import Capture, SpanRecorder, activate
from agl.contracts import Tracer
from benchmarks._harness import Case, Figure, interleave

BAR_MS = 0.3
"""CPU milliseconds that a tracer may add to one model call, its agents, nodes and tools included."""


def overhead(name: str, tracer: Tracer, work: Callable[[], int], *, repeats: int) -> Figure:
    """What ``tracer`` adds to a model call; ``work`` makes some, of a model that answers at once, and counts them."""
    recorder = SpanRecorder()

    def observed() -> int:
        capture = Capture(
            rollout_id="ro-1",
            attempt_id="ro-1.1",
            trace_id="a" * 32,
            root_span_id="1" * 16,
            record=recorder.record,
            current_span_id=tracer.current_span_id,
        )
        with activate(capture):
            count = work()
        assert len(recorder.drain()) >= count, "the tracer saw fewer model calls than were made"
        return count

    tracer.install()
    try:
        cases: dict[str, Case] = {"bare": work, "observed": observed}
        found = interleave(cases, repeats=repeats)
    finally:
        tracer.uninstall()
    bare, seen = (found[case].cpu_s * 1e3 for case in ("bare", "observed"))
    return Figure(
        name=name,
        value=seen - bare,
        unit="ms",
        bar=BAR_MS,
        better="lower",
        baseline=bare,
        baseline_name="the framework's own time per model call",
        cpu_us=seen * 1e3,
    )
