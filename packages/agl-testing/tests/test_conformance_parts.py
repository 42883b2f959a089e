"""The conformance classes pass correct tracers, rewards, credits and runners, and detect faulty ones."""

import asyncio
import contextvars
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agl.contracts import Tracer
from agl.errors import AglError
from agl.schemas import CallCredit, Claim, Episode, ErrorInfo, Outcome, Reward, Rollout, Span, new_span_id
from agl.tracing import OpenSpan, current, open_span
from agl_run import RunContext
from agl_testing.conformance import (
    CreditConformance,
    RewardCase,
    RewardConformance,
    RunnerConformance,
    TracerConformance,
    TracerScenario,
)
from agl_testing.conformance.samples import chat_span, rollout_of


class Framework:
    """A minimal framework with a callback around its only operation."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[str, BaseException | None], None]] = []

    def operate(self, work: Callable[[], Any]) -> None:
        error: BaseException | None = None
        self._tell("start", None)
        try:
            work()
        except Exception as raised:
            error = raised
            raise
        finally:
            self._tell("end", error)

    def _tell(self, event: str, error: BaseException | None) -> None:
        for callback in list(self.callbacks):
            callback(event, error)


class CallbackTracer:
    """A correct tracer of :class:`Framework`."""

    def __init__(self, framework: Framework) -> None:
        self.framework = framework
        self._open: contextvars.ContextVar[str | None] = contextvars.ContextVar("open", default=None)

    def install(self) -> None:
        if self.on_event not in self.framework.callbacks:
            self.framework.callbacks.append(self.on_event)

    def uninstall(self) -> None:
        if self.on_event in self.framework.callbacks:
            self.framework.callbacks.remove(self.on_event)

    def on_event(self, event: str, error: BaseException | None) -> None:
        capture = current()
        if capture is None:
            return
        if event == "start":
            self._open.set(new_span_id())
            return
        span = Span(
            rollout_id=capture.rollout_id,
            attempt_id=capture.attempt_id,
            span_id=self._open.get() or "",
            parent_id=capture.root_span_id,
            name="operation",
            start_ns=1,
            end_ns=2,
            status="error" if error else "ok",
        )
        self._open.set(None)
        try:
            self.send(capture.record, span)
        except RuntimeError:
            self.last_lost = span

    def send(self, record: Callable[[Span], None], span: Span) -> None:
        record(span)

    def current_span_id(self) -> str | None:
        return self._open.get()

    def flush(self, timeout_s: float) -> None: ...

    def worker_env(self) -> dict[str, str]:
        return {}


class InstallsTwice(CallbackTracer):
    def install(self) -> None:
        self.framework.callbacks.append(lambda event, error: self.on_event(event, error))


class ForgetsErrors(CallbackTracer):
    def on_event(self, event: str, error: BaseException | None) -> None:
        super().on_event(event, None)


class RemembersOneAttempt(CallbackTracer):
    seen: Any = None

    def send(self, record: Callable[[Span], None], span: Span) -> None:
        self.seen = self.seen or record
        self.seen(span)


class RaisesIntoTheAgent(CallbackTracer):
    def on_event(self, event: str, error: BaseException | None) -> None:
        super().on_event(event, error)
        if hasattr(self, "last_lost"):
            raise RuntimeError("lost a span")


class OpenSpanTracer(Tracer):
    """A correct tracer of :class:`Framework` that uses :func:`open_span` for its bookkeeping."""

    is_current = True

    def __init__(self, framework: Framework) -> None:
        self.framework = framework
        self._open: contextvars.ContextVar[OpenSpan | None] = contextvars.ContextVar("open", default=None)

    def install(self) -> None:
        if self.on_event not in self.framework.callbacks:
            self.framework.callbacks.append(self.on_event)

    def uninstall(self) -> None:
        if self.on_event in self.framework.callbacks:
            self.framework.callbacks.remove(self.on_event)

    def on_event(self, event: str, error: BaseException | None) -> None:
        span = self._open.get()
        if event == "start":
            self._open.set(open_span(node="operate", is_current=self.is_current))
        elif span is not None:
            self.close(span, error)

    def close(self, span: OpenSpan, error: BaseException | None) -> None:
        span.close(error)


class NamesNoCurrentSpan(OpenSpanTracer):
    is_current = False


class NeverCloses(OpenSpanTracer):
    def close(self, span: OpenSpan, error: BaseException | None) -> None: ...


def scenario_of(tracer: type[CallbackTracer | OpenSpanTracer]) -> TracerScenario:
    framework = Framework()

    def fail(error: Exception) -> None:
        def work() -> None:
            raise error

        framework.operate(work)

    return TracerScenario(tracer=tracer(framework), run=framework.operate, fail=fail)


class TestCallbackTracer(TracerConformance):
    @pytest.fixture
    def scenario(self) -> TracerScenario:
        return scenario_of(CallbackTracer)


class TestOpenSpanTracer(TracerConformance):
    @pytest.fixture
    def scenario(self) -> TracerScenario:
        return scenario_of(OpenSpanTracer)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (InstallsTwice, "test_installing_twice_records_once"),
        (InstallsTwice, "test_uninstalled_tracer_records_nothing_and_can_be_installed_again"),
        (ForgetsErrors, "test_exception_of_the_agent_passes_through_and_is_recorded"),
        (RemembersOneAttempt, "test_concurrent_attempts_in_threads_keep_apart"),
        (RaisesIntoTheAgent, "test_failure_of_recording_never_reaches_the_agent"),
        (NamesNoCurrentSpan, "test_current_span_is_a_span_that_gets_recorded"),
        (NeverCloses, "test_events_become_spans_of_the_attempt_in_one_tree"),
    ],
)
def test_broken_tracer_fails_the_test_that_protects_from_it(
    broken: type[CallbackTracer | OpenSpanTracer], test: str
) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        getattr(TracerConformance(), test)(scenario_of(broken))


def answers_right(rollout: Rollout, spans: Sequence[Span]) -> float | None:
    calls = [span.call for span in spans if span.call is not None]
    if not calls:
        return None
    return float(calls[-1].response["choices"][0]["message"]["content"] == rollout.task["answer"])


class TestFunctionReward(RewardConformance):
    @pytest.fixture
    def emitter(self) -> Any:
        return answers_right

    @pytest.fixture
    def cases(self) -> list[RewardCase]:
        rollout = rollout_of(self.task)
        right, wrong = chat_span(rollout, text="42"), chat_span(rollout, text="41")
        return [
            RewardCase(rollout=rollout, spans=(right,), expected=1.0),
            RewardCase(rollout=rollout, spans=(right, wrong), expected=0.0),
            RewardCase(rollout=rollout, spans=(), expected=None),
        ]


class TestCoroutineReward(RewardConformance):
    @pytest.fixture
    def emitter(self) -> Any:
        async def emit(rollout: Rollout, spans: Sequence[Span]) -> list[Reward]:
            await asyncio.sleep(0)
            return [Reward(value=0.5, scope="span", span_id=span.span_id) for span in spans]

        return emit


_DRAWS = count()


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (lambda rollout, spans: float("nan"), "test_rewards_are_finite_numbers_or_no_opinion"),
        (lambda rollout, spans: Reward(value=1.0, span_id="nobody"), "test_rewards_about_spans_name_recorded_spans"),
        (lambda rollout, spans: next(_DRAWS), "test_equal_records_get_equal_rewards"),
        (lambda rollout, spans: rollout.task.clear(), "test_records_are_left_as_they_were"),
        (lambda rollout, spans: Reward(value=1.0, source="agent"), "test_agent_is_never_named_as_the_source"),
        (
            lambda rollout, spans: Reward(value=1.0, dimensions={"style": float("inf")}),
            "test_rewards_are_finite_numbers_or_no_opinion",
        ),
        (lambda rollout, spans: ["good"], "test_rewards_are_finite_numbers_or_no_opinion"),
    ],
)
def test_broken_reward_fails_the_test_that_protects_from_it(broken: Any, test: str) -> None:
    rollout = rollout_of({"answer": "42"})
    attempts = [(rollout, [chat_span(rollout, text="42")])]
    with pytest.raises(AssertionError):
        getattr(RewardConformance(), test)(broken, attempts)


def test_reward_that_misses_a_stated_case_fails() -> None:
    rollout = rollout_of({"answer": "42"})
    case = RewardCase(rollout=rollout, spans=(chat_span(rollout, text="41"),), expected=1.0)
    with pytest.raises(AssertionError):
        RewardConformance().test_stated_cases_get_their_values(answers_right, [case])


class PlainCredit:
    def assign(self, group: Sequence[Episode]) -> list[list[CallCredit]]:
        return [[self.give(episode, call.span_id) for call in self.live(episode)] for episode in group]

    def live(self, episode: Episode) -> list[Any]:
        return [call for call in episode.transitions if not call.reject]

    def give(self, episode: Episode, span_id: str) -> CallCredit:
        return CallCredit(span_id=span_id, value=episode.reward or 0.0, baseline=episode.rollout.group_id)


class CountsRejected(PlainCredit):
    def live(self, episode: Episode) -> list[Any]:
        return list(episode.transitions)


class SharesBaseline(PlainCredit):
    def give(self, episode: Episode, span_id: str) -> CallCredit:
        return CallCredit(span_id=span_id, value=1.0, baseline="all")


class CountsRows(PlainCredit):
    def give(self, episode: Episode, span_id: str) -> CallCredit:
        value = 1.0 / max(1, len(episode.rows))
        return CallCredit(span_id=span_id, value=value, baseline=episode.rollout.group_id)


class GivesNothingToCount(PlainCredit):
    def give(self, episode: Episode, span_id: str) -> CallCredit:
        return CallCredit(span_id=span_id, value=float("nan"), baseline=episode.rollout.group_id)


class Draws(PlainCredit):
    def give(self, episode: Episode, span_id: str) -> CallCredit:
        return CallCredit(span_id=span_id, value=float(next(_DRAWS)), baseline=episode.rollout.group_id)


class ChangesEpisodes(PlainCredit):
    def assign(self, group: Sequence[Episode]) -> list[list[CallCredit]]:
        for episode in group:
            episode.rollout.task["seen"] = True
        return super().assign(group)


class NeedsEpisodes(PlainCredit):
    def assign(self, group: Sequence[Episode]) -> list[list[CallCredit]]:
        return super().assign(group) or [[]]


class CountsFromTheFirst(PlainCredit):
    def assign(self, group: Sequence[Episode]) -> list[list[CallCredit]]:
        return [
            [msgspec.structs.replace(given, value=float(place)) for given in credits]
            for place, credits in enumerate(super().assign(group))
        ]


class ComparesSiblings(PlainCredit):
    def assign(self, group: Sequence[Episode]) -> list[list[CallCredit]]:
        mean = sum(episode.reward or 0.0 for episode in group) / max(1, len(group))
        return [
            [msgspec.structs.replace(given, value=given.value - mean) for given in credits]
            for credits in super().assign(group)
        ]


class TestPlainCredit(CreditConformance):
    @pytest.fixture
    def credit(self) -> PlainCredit:
        return PlainCredit()


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (CountsRejected, "test_exactly_the_calls_that_are_not_rejected_get_credit_in_order"),
        (SharesBaseline, "test_baselines_never_compare_tasks"),
        (GivesNothingToCount, "test_values_are_finite_and_baselines_are_named"),
        (Draws, "test_assignment_is_deterministic_and_leaves_episodes_as_they_were"),
        (ChangesEpisodes, "test_assignment_is_deterministic_and_leaves_episodes_as_they_were"),
        (NeedsEpisodes, "test_empty_groups_and_episodes_without_calls_get_nothing"),
        (CountsFromTheFirst, "test_order_of_the_episodes_does_not_matter"),
        (ComparesSiblings, "test_siblings_do_not_change_an_episodes_returns"),
        (CountsRows, "test_splitting_a_rollout_into_other_rows_changes_nothing"),
    ],
)
def test_broken_credit_fails_the_test_that_protects_from_it(broken: type[PlainCredit], test: str) -> None:
    with pytest.raises(AssertionError):
        getattr(CreditConformance(), test)(broken())


class NaiveRunner:
    """A faulty runner, which swallows every error of the agent, and has no time limit."""

    def __init__(self, setup: RunContext) -> None:
        self.agent = setup.agent.load()

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def execute(self, claim: Claim) -> Outcome:
        try:
            value = await asyncio.to_thread(self.agent.call, claim.rollout, {})
            value = await value if asyncio.iscoroutine(value) else value
        except (Exception, SystemExit) as error:
            if isinstance(error, AglError):
                raise
            return Outcome(attempt_id=claim.attempt.attempt_id, status="failed", error=ErrorInfo(type="", message=""))
        return Outcome(attempt_id=claim.attempt.attempt_id, status="succeeded")


@pytest.mark.parametrize(
    "test",
    [
        "test_returned_number_is_the_reward",
        "test_agent_that_raises_is_a_failed_outcome_with_its_error",
        "test_returned_object_that_is_no_json_is_a_failed_outcome_that_says_so",
        "test_agent_does_not_see_hidden_fields",
    ],
)
def test_naive_runner_fails_the_runners_tests(test: str) -> None:
    with pytest.raises(AssertionError):
        getattr(RunnerConformance(), test)(NaiveRunner)


def test_sample_agents_need_no_setup(tmp_path: Path) -> None:
    from agl_testing.agents import behave

    assert 0.5 == behave({"do": "return", "value": 0.5})
    assert ["a", "do"] == behave({"do": "keys", "a": 1})
