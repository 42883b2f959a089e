"""The adapters' benchmarks compare the same framework code bare, without a tracer, and in observed rollouts."""

from collections.abc import Callable

from agl.contracts import Tracer
from agl.tracing import ActiveAttempt, SpanRecorder, activate
from benchmarks._harness import Figure, Prepared, interleave

BAR_MS = 0.3
"""CPU milliseconds that a tracer may add to one model call, its agents, nodes and tools included."""


def overhead(
    name: str, tracer: Tracer, work: Callable[[], int], *, repeats: int, bare: Callable[[], int] | None = None
) -> Figure:
    """Measure the cost of ``tracer`` per model call; ``work`` makes and counts calls to a model that answers at once.

    ``bare`` is the same work where being without the tracer takes more than not installing it.
    """
    recorder = SpanRecorder()

    def observed() -> int:
        capture = ActiveAttempt(
            rollout_id="ro-1",
            attempt_id="ro-1.1",
            trace_id="a" * 32,
            root_span_id="1" * 16,
            record=recorder.record,
            tracers=(tracer,),
        )
        with activate(capture):
            count = work()
        assert len(recorder.drain()) >= count, "the tracer saw fewer model calls than were made"
        return count

    def without(_: None) -> int:
        return (bare or work)()

    cases = {
        "bare": Prepared(prepare=tracer.uninstall, act=without),
        "observed": Prepared(prepare=tracer.install, act=lambda _: observed()),
    }
    try:
        found = interleave(cases, repeats=repeats)
    finally:
        tracer.uninstall()
    own, seen = (found[case].cpu_s * 1e3 for case in ("bare", "observed"))
    return Figure(
        name=name,
        value=seen - own,
        unit="ms",
        bar=BAR_MS,
        better="lower",
        baseline=own,
        baseline_name="the framework's own time per model call",
        cpu_us=seen * 1e3,
    )
