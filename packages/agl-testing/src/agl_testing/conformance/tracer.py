"""The conformance class of tracers: an attempt's spans form one tree, and tracing never harms the agent."""

# ruff: noqa: D102  # the names of the tests say what holds

import asyncio
import inspect
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Never

import pytest

from agl.contracts import Tracer
from agl.schemas import Span, new_rollout_id, new_span_id, new_trace_id
from agl.tracing import ActiveAttempt, activate, current_span_id
from agl_testing.conformance._base import Conformance, require

Probe = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class TracerScenario:
    """A tracer, and a small program in the framework that it observes.

    Attributes:
        tracer: The tracer, not installed.
        run: A function or coroutine function that does some work in the framework, and calls the probe once within the
            innermost operation. It must also work without the tracer.
        fail: A function or coroutine function that raises the given exception within an operation of the framework.
        patched: The attributes that ``install`` replaces, as pairs of owner and name; ``uninstall`` must restore them.
        attempt: Further fields of the active attempt, such as ``upstreams``.
    """

    tracer: Tracer
    run: Callable[[Probe], Any]
    fail: Callable[[Exception], Any]
    patched: tuple[tuple[object, str], ...] = ()
    attempt: Mapping[str, Any] = field(default_factory=dict[str, Any])


class TracerConformance(Conformance):
    """Run every test of the tracer contract.

    .. code-block:: python

        class TestMyTracer(TracerConformance):
            @pytest.fixture
            def scenario(self):
                return TracerScenario(tracer=MyTracer(), run=two_nodes, fail=node_that_raises)
    """

    contract: ClassVar[str] = "tracer"

    has_current_span: ClassVar[bool] = True
    """True if a model call that is made within the framework belongs to one of the tracer's spans."""

    records_errors: ClassVar[bool] = True
    """True if an operation that raises becomes a span with status ``error``."""

    @pytest.fixture
    def scenario(self) -> TracerScenario:
        """The tracer and a program in its framework; the only fixture to override."""
        raise NotImplementedError("override the fixture 'scenario' with the tracer under test")

    def test_events_become_spans_of_the_attempt_in_one_tree(self, scenario: TracerScenario) -> None:
        with _installed(scenario):
            attempt = _Attempt(scenario)
            attempt.play(scenario.run)
        assert attempt.spans
        attempt.check_tree()

    def test_nothing_is_recorded_outside_a_rollout(self, scenario: TracerScenario) -> None:
        with _installed(scenario):
            _call(scenario.run, _no_probe)
            assert scenario.tracer.current_span_id() is None
            attempt = _Attempt(scenario)
            with attempt.active():
                pass
        assert [] == attempt.spans

    def test_installing_twice_records_once(self, scenario: TracerScenario) -> None:
        with _installed(scenario):
            once = _Attempt(scenario)
            once.play(scenario.run)
            scenario.tracer.install()
            twice = _Attempt(scenario)
            twice.play(scenario.run)
        assert sorted(s.name for s in once.spans) == sorted(s.name for s in twice.spans)

    def test_uninstalled_tracer_records_nothing_and_can_be_installed_again(self, scenario: TracerScenario) -> None:
        with _installed(scenario):
            before = _Attempt(scenario)
            before.play(scenario.run)
        scenario.tracer.uninstall()
        without = _Attempt(scenario)
        without.play(scenario.run)
        assert [] == without.spans
        with _installed(scenario):
            again = _Attempt(scenario)
            again.play(scenario.run)
        assert sorted(s.name for s in before.spans) == sorted(s.name for s in again.spans)

    def test_uninstalling_restores_the_originals(self, scenario: TracerScenario) -> None:
        originals = [inspect.getattr_static(owner, name) for owner, name in scenario.patched]
        with _installed(scenario):
            _Attempt(scenario).play(scenario.run)
        restored = [inspect.getattr_static(owner, name) for owner, name in scenario.patched]
        assert all(a is b for a, b in zip(originals, restored, strict=True))

    def test_current_span_is_a_span_that_gets_recorded(self, scenario: TracerScenario) -> None:
        require(self.has_current_span, "has_current_span", "tracer")
        seen: list[str | None] = []
        with _installed(scenario):
            attempt = _Attempt(scenario)
            attempt.play(scenario.run, lambda: seen.append(current_span_id()))
            assert scenario.tracer.current_span_id() is None
        assert 1 == len(seen)
        assert seen[0] in {s.span_id for s in attempt.spans}

    def test_concurrent_attempts_in_threads_keep_apart(self, scenario: TracerScenario) -> None:
        def play(attempt: _Attempt) -> None:
            attempt.play(scenario.run)

        with _installed(scenario):
            attempts = [_Attempt(scenario) for _ in range(6)]
            with ThreadPoolExecutor(len(attempts)) as pool:
                list(pool.map(play, attempts))
        _check_equal(attempts)

    def test_concurrent_attempts_in_one_event_loop_keep_apart(self, scenario: TracerScenario) -> None:
        async def play(attempt: _Attempt) -> None:
            with attempt.active():
                if inspect.iscoroutinefunction(scenario.run):
                    await scenario.run(_no_probe)
                else:
                    await asyncio.to_thread(scenario.run, _no_probe)

        async def play_all(attempts: list[_Attempt]) -> None:
            await asyncio.gather(*map(play, attempts))

        with _installed(scenario):
            attempts = [_Attempt(scenario) for _ in range(6)]
            asyncio.run(play_all(attempts))
            scenario.tracer.flush(1.0)
        _check_equal(attempts)

    def test_exception_of_the_agent_passes_through_and_is_recorded(self, scenario: TracerScenario) -> None:
        def raised(error: Exception, attempt: _Attempt | None) -> BaseException:
            play = partial(_call, scenario.fail) if attempt is None else partial(attempt.play, scenario.fail)
            with pytest.raises(Exception, match="agent") as caught:
                play(error)
            return caught.value

        plain, traced = ValueError("agent"), ValueError("agent")
        expected = raised(plain, None)
        with _installed(scenario):
            attempt = _Attempt(scenario)
            actual = raised(traced, attempt)
        assert (type(expected), str(expected), expected is plain) == (type(actual), str(actual), actual is traced)
        if self.records_errors:
            assert "error" in {s.status for s in attempt.spans}

    def test_failure_of_recording_never_reaches_the_agent(self, scenario: TracerScenario) -> None:
        with _installed(scenario):
            attempt = _Attempt(scenario, record=_broken_record)
            attempt.play(scenario.run)

    def test_flush_returns_in_time_and_worker_env_is_text(self, scenario: TracerScenario) -> None:
        with _installed(scenario):
            started = time.monotonic()
            scenario.tracer.flush(0.2)
            assert time.monotonic() - started < 2
            environment = scenario.tracer.worker_env()
        assert all(isinstance(text, str) for item in environment.items() for text in item)


class _Attempt:
    """An attempt, and the spans recorded for it."""

    def __init__(self, scenario: TracerScenario, *, record: Callable[[Span], None] | None = None) -> None:
        self.spans: list[Span] = []
        self._scenario = scenario
        rollout_id = new_rollout_id()
        self._active = ActiveAttempt(
            rollout_id=rollout_id,
            attempt_id=f"{rollout_id}.1",
            trace_id=new_trace_id(),
            root_span_id=new_span_id(),
            record=record or self.spans.append,
            tracers=(scenario.tracer,),
            **scenario.attempt,
        )

    @contextmanager
    def active(self) -> Generator[None]:
        with activate(self._active):
            yield

    def play(self, work: Callable[[Any], Any], argument: Any = None) -> None:
        with self.active():
            try:
                _call(work, argument or _no_probe)
            finally:
                self._scenario.tracer.flush(1.0)

    def check_tree(self) -> None:
        own = (self._active.rollout_id, self._active.attempt_id)
        assert {own} == {(s.rollout_id, s.attempt_id) for s in self.spans}
        ids = [s.span_id for s in self.spans]
        assert sorted(set(ids)) == sorted(ids)
        assert {s.parent_id for s in self.spans} <= {*ids, self._active.root_span_id}
        assert all(s.end_ns >= s.start_ns > 0 and s.name for s in self.spans)
        assert [] == [s.name for s in self.spans if "still open" in s.status_message]


def _check_equal(attempts: list[_Attempt]) -> None:
    """Assert that attempts which did the same work each recorded their own tree of spans, with equal names."""
    for attempt in attempts:
        assert attempt.spans
        attempt.check_tree()
        assert sorted(s.name for s in attempts[0].spans) == sorted(s.name for s in attempt.spans)


@contextmanager
def _installed(scenario: TracerScenario) -> Generator[None]:
    scenario.tracer.install()
    try:
        yield
    finally:
        scenario.tracer.uninstall()


def _call(work: Callable[[Any], Any], argument: Any) -> None:
    result = work(argument)
    if inspect.isawaitable(result):
        asyncio.run(_await(result))


async def _await(result: Any) -> None:
    await result


def _no_probe() -> None:
    """A probe that does nothing."""


def _broken_record(span: Span) -> Never:
    raise RuntimeError(f"the recorder is broken; lost {span.name}")
