"""Tracing in the agent's process: emitters outside and inside a rollout, activation, and the wire hook per call.

Run it with ``python benchmarks/bench_capture.py``. The wire rows need agl-testing, and openai or httpx.
"""

import sys
import threading
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agl import emit_message, emit_reward, operation
from agl.contracts import Upstream
from agl.tracing import ActiveAttempt, OtelTracer, SpanRecorder, activate
from benchmarks._harness import Case, Figure, interleave, table

_SPANS = 5_000
_CALLS = 60
_CHAT = {"model": "m", "messages": [{"role": "user", "content": "x " * 2000}]}


def attempt(recorder: SpanRecorder, **fields: Any) -> ActiveAttempt:
    return ActiveAttempt(
        rollout_id="ro-1",
        attempt_id="ro-1.1",
        trace_id="a" * 32,
        root_span_id="1" * 16,
        record=recorder.record,
        **fields,
    )


def inside(body: Callable[[], None]) -> Case:
    """Many calls of ``body`` in one rollout."""

    def run() -> int:
        recorder = SpanRecorder()
        with activate(attempt(recorder)):
            for _ in range(_SPANS):
                body()
        return _SPANS

    return run


def outside(body: Callable[[], None]) -> Case:
    """Many calls of ``body`` outside any rollout."""

    def run() -> int:
        for _ in range(20 * _SPANS):
            body()
        return 20 * _SPANS

    return run


def step() -> None:
    """The smallest operation."""
    with operation("step", step=1):
        pass


def emitters(*, repeats: int) -> list[Figure]:
    """CPU microseconds per emitter, next to an OpenTelemetry SDK span with a batch processor."""
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(InMemorySpanExporter(), schedule_delay_millis=60_000))
    otel = provider.get_tracer("bench")

    def otel_span() -> int:
        for _ in range(_SPANS):
            with otel.start_as_current_span("step", attributes={"step": 1}):
                pass
        return _SPANS

    cases = {
        "an OpenTelemetry SDK span": otel_span,
        "an empty function": outside(lambda: None),
        "emit_reward outside a rollout": outside(lambda: emit_reward(1.0)),
        "operation outside a rollout": outside(step),
        "emit_reward inside": inside(lambda: emit_reward(1.0)),
        "emit_message inside": inside(lambda: emit_message("hello")),
        "operation inside": inside(step),
    }
    found = interleave(cases, repeats=repeats)
    provider.shutdown()
    bare, span = (found[name].cpu_s * 1e6 for name in ("an empty function", "an OpenTelemetry SDK span"))
    figures = [
        _micro(name, found[name].cpu_s * 1e6, bar=1.0, baseline=bare, baseline_name="an empty function")
        for name in ("emit_reward outside a rollout", "operation outside a rollout")
    ]
    figures += [
        _micro(name, found[name].cpu_s * 1e6, bar=25.0, baseline=span, baseline_name="an OpenTelemetry SDK span")
        for name in ("emit_reward inside", "emit_message inside", "operation inside")
    ]
    return figures


def foreign_spans(*, repeats: int) -> Figure:
    """The cost of taking a foreign OpenTelemetry span into the rollout."""
    from opentelemetry import trace

    recorder, tracer = SpanRecorder(), OtelTracer()
    tracer.install()
    otel = trace.get_tracer("bench")

    def spans() -> int:
        for _ in range(_SPANS):
            with otel.start_as_current_span("step", attributes={"step": 1}):
                pass
        return _SPANS

    def recorded() -> int:
        with activate(attempt(recorder, tracers=(tracer,))):
            spans()
        return len(recorder.drain())

    found = interleave({"bare": spans, "recorded": recorded}, repeats=repeats)
    tracer.uninstall()
    bare = found["bare"].wall_s * 1e6
    return _micro(
        "an OpenTelemetry span taken into a rollout",
        found["recorded"].wall_s * 1e6,
        baseline=bare,
        baseline_name="the span outside a rollout",
    )


def activation(*, repeats: int) -> Figure:
    """The cost of entering and leaving a rollout, patches included."""
    recorder = SpanRecorder()

    def enter() -> int:
        for _ in range(_SPANS):
            with activate(attempt(recorder)):
                pass
        return _SPANS

    def thread() -> int:
        for _ in range(200):
            one = threading.Thread(target=int)
            one.start()
            one.join()
        return 200

    found = interleave({"activate": enter, "thread": thread}, repeats=repeats)
    return _micro(
        "activate a rollout, first in its process",
        found["activate"].wall_s * 1e6,
        baseline=found["thread"].wall_s * 1e6,
        baseline_name="starting and joining a thread",
    )


def calls(
    name: str, make: Callable[[str], tuple[Callable[[bool], None], Callable[[], None]]], *, repeats: int
) -> Iterable[Figure]:
    """CPU microseconds of this process per model call, the server's included: bare, redirected, and recorded."""
    from agl_testing.model_server import Reply, ScriptedModelServer

    with ScriptedModelServer(default=Reply(text="word " * 200, chunks=40)) as server:
        call, close = make(server.base_url)
        recorder = SpanRecorder()
        policy = Upstream(name="m", base_url=server.base_url)
        direct = attempt(recorder, upstreams=(policy,))
        gateway = attempt(recorder, upstreams=(policy,), gateway_url=server.url, token="agl_a.b")

        def case(mine: ActiveAttempt | None, *, is_streamed: bool) -> Case:
            def run() -> int:
                count = _CALLS // 5 if is_streamed else _CALLS
                if mine is None:
                    _repeat(call, count, is_streamed=is_streamed)
                else:
                    with activate(mine):
                        _repeat(call, count, is_streamed=is_streamed)
                recorder.drain()
                server.clear_calls()
                return count

            return run

        for is_streamed in (False, True):
            kind = "streamed" if is_streamed else "plain"
            found = interleave(
                {
                    "bare": case(None, is_streamed=is_streamed),
                    "redirected": case(gateway, is_streamed=is_streamed),
                    "recorded": case(direct, is_streamed=is_streamed),
                },
                repeats=repeats,
            )
            bare = found["bare"].cpu_s * 1e6
            for row in ("redirected", "recorded"):
                yield _micro(
                    f"{name}, a {kind} call {row}",
                    found[row].cpu_s * 1e6,
                    baseline=bare,
                    baseline_name="the bare client, CPU, server included",
                )
        close()


def httpx_calls(module: str) -> Callable[[str], tuple[Callable[[bool], None], Callable[[], None]]]:
    def make(base_url: str) -> tuple[Callable[[bool], None], Callable[[], None]]:
        client = import_module(module).Client()

        def call(is_streamed: bool) -> None:
            client.post(f"{base_url}/chat/completions", json={**_CHAT, "stream": is_streamed})

        return call, client.close

    return make


def openai_calls(base_url: str) -> tuple[Callable[[bool], None], Callable[[], None]]:
    client = import_module("openai").OpenAI(base_url=base_url, api_key="none")

    def call(is_streamed: bool) -> None:
        answer = client.chat.completions.create(**_CHAT, stream=is_streamed)
        if is_streamed:
            for _ in answer:
                pass

    return call, client.close


def run(*, quick: bool) -> list[Figure]:
    """Every figure that the installed packages allow."""
    repeats = 1 if quick else 5
    figures = [*emitters(repeats=repeats), foreign_spans(repeats=repeats), activation(repeats=repeats)]
    if find_spec("agl_testing") is None:
        return figures
    for module in ("httpx", "httpx2"):
        if find_spec(module):
            figures += calls(module, httpx_calls(module), repeats=repeats)
    if find_spec("openai"):
        figures += calls(f"openai {import_module('openai').__version__}", openai_calls, repeats=repeats)
    return figures


def _repeat(call: Callable[[bool], None], count: int, *, is_streamed: bool) -> None:
    for _ in range(count):
        call(is_streamed)


def _micro(name: str, value: float, *, bar: float | None = None, baseline: float, baseline_name: str) -> Figure:
    return Figure(
        name=name, value=value, unit="us", bar=bar, better="lower", baseline=baseline, baseline_name=baseline_name
    )


if __name__ == "__main__":
    print(table(run(quick=False)))
