"""Our patches together with other instrumentation, installed before and after ours, removed in either order."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from agl.tracing import ActiveAttempt, SpanRecorder, activate, current

wrapt = pytest.importorskip("wrapt", reason="needs wrapt, with which instrumentations patch")
httpx = pytest.importorskip("httpx")

Switch = Callable[[], Callable[[], None]]
"""Installs an instrumentation, and returns a function that removes it."""


def otel(name: str, kind: str) -> Switch:
    def on() -> Callable[[], None]:
        module = pytest.importorskip(f"opentelemetry.instrumentation.{name}")
        instrumentor = getattr(module, kind)()
        instrumentor.instrument()
        return instrumentor.uninstrument

    return on


def datadog_like() -> Callable[[], None]:
    """Wrap the methods that Datadog wraps, in its way: each wrapper needs the object on which it was called."""
    places = (
        (threading.Thread, "start"),
        (ThreadPoolExecutor, "submit"),
        (httpx.Client, "send"),
        (httpx.AsyncClient, "send"),
    )

    def count(wrapped: Any, instance: Any, args: Any, options: Any) -> Any:
        assert instance is not None, f"{wrapped} was called without its object"
        return wrapped(*args, **options)

    def off() -> None:
        for owner, name in places:
            if isinstance(found := vars(owner)[name], wrapt.ObjectProxy):
                setattr(owner, name, found.__wrapped__)

    for owner, name in places:
        setattr(owner, name, wrapt.FunctionWrapper(vars(owner)[name], count))
    return off


SWITCHES = {
    "threading": otel("threading", "ThreadingInstrumentor"),
    "httpx": otel("httpx", "HTTPXClientInstrumentor"),
    "requests": otel("requests", "RequestsInstrumentor"),
    "aiohttp": otel("aiohttp_client", "AioHttpClientInstrumentor"),
    "logging": otel("logging", "LoggingInstrumentor"),
    "datadog-like": datadog_like,
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Remove attributes that a foreign instrumentation leaves on a class, such as ``Timer.start``."""
    kinds = (threading.Thread, threading.Timer, ThreadPoolExecutor, httpx.Client, httpx.AsyncClient)
    before = [dict(vars(kind)) for kind in kinds]
    yield
    for kind, names in zip(kinds, before, strict=True):
        for name in set(vars(kind)) - set(names):
            delattr(kind, name)
        for name, value in names.items():
            if vars(kind)[name] is not value:
                setattr(kind, name, value)


@contextmanager
def rollout() -> Iterator[SpanRecorder]:
    recorder = SpanRecorder()
    attempt = ActiveAttempt(
        rollout_id="ro-1", attempt_id="ro-1.1", trace_id="a" * 32, root_span_id="1" * 16, record=recorder.record
    )
    with activate(attempt):
        yield recorder


def work(recorder: SpanRecorder) -> None:
    """Check that threads, timers and executors carry the rollout, and that a model call is recorded once."""
    seen: list[Any] = []
    for thread in (
        threading.Thread(target=lambda: seen.append(current())),
        threading.Timer(0.0, lambda: seen.append(current())),
    ):
        thread.start()
        thread.join()
    with ThreadPoolExecutor(1) as executor:
        seen.append(executor.submit(current).result())
        assert 6 == executor.submit(lambda a, *, b: a * b, 2, b=3).result()
    assert [True, True, True] == [one is not None and "ro-1.1" == one.attempt_id for one in seen]
    recorder.drain()
    with httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200, json={"choices": []}))) as client:
        client.post("http://x/v1/chat/completions", json={"model": "m", "messages": []})
    assert 1 == len(recorder.drain())


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("is_off_inside", [False, True], ids=["off-after", "off-inside"])
@pytest.mark.parametrize("is_on_inside", [False, True], ids=["on-before", "on-inside"])
def test_rollouts_work_beside_another_instrumentation(name: str, is_on_inside: bool, is_off_inside: bool) -> None:
    off = None if is_on_inside else SWITCHES[name]()
    try:
        with rollout() as recorder:
            off = off or SWITCHES[name]()
            work(recorder)
            if is_off_inside:
                off()
                work(recorder)
        assert current() is None
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
    finally:
        if not is_off_inside and off is not None:
            off()
        with rollout() as recorder:
            work(recorder)
