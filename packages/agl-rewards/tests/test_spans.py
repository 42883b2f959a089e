from typing import Any

import msgspec
import pytest

from agl import semconv
from agl.contracts import RewardEmitter
from agl.episodes import build_episode
from agl.errors import ConfigError
from agl.schemas import Attempt, Reward, Span, SpanEvent
from agl_rewards.credit.turn import TurnCredit
from agl_rewards.spans import EVENTS, SpanRewards
from agl_testing.conformance.reward import RewardConformance

from .cases import agent, chat, rollout, several, span, tool

ALL = dict.fromkeys(EVENTS, 1.0)


class TestTurns(RewardConformance):
    @pytest.fixture
    def emitter(self) -> RewardEmitter:
        return SpanRewards()


class TestSpans(RewardConformance):
    @pytest.fixture
    def emitter(self) -> RewardEmitter:
        return SpanRewards(weights=ALL, steps=".*", scope="span")


class TestRollout(RewardConformance):
    @pytest.fixture
    def emitter(self) -> RewardEmitter:
        return SpanRewards(scope="rollout")


def exception(number: int, **fields: Any) -> Span:
    return span(number, "exception ValueError", attributes={semconv.ERROR_TYPE: "ValueError"}, status="error", **fields)


SPANS = [
    span(0, semconv.ROOT_SPAN_NAME, status="error", seconds=100),
    chat(1, None),
    tool(2, arguments='{"word": "sun"}'),
    tool(3, arguments='{"word": "sun"}', status="error", message="no index"),
    chat(4, None, retry_count=1),
    tool(5, "calc", arguments='{"x": 1}'),
    span(6, "execute", seconds=1),
    span(8, "execute", status="error", seconds=3, message="no table"),
    exception(9, parent="s8"),
    agent(12, "check", seconds=2),
    chat(13, "done", parent="s12"),
]


def events(spans: list[Span], **params: Any) -> list[tuple[str, str | None]]:
    emitter = SpanRewards(weights=ALL, scope="span", **{"steps": "none", **params})
    return [(next(iter(reward.dimensions)), reward.span_id) for reward in several(emitter, {}, spans)]


def test_every_event_is_found_where_it_happened() -> None:
    expected = [
        ("tool_ok", "s2"),
        ("tool_error", "s3"),
        ("repeat", "s3"),
        ("retry", "s4"),
        ("tool_ok", "s5"),
        ("step_ok", "s6"),
        ("step_error", "s8"),
        ("exception", "s9"),
        ("step_ok", "s12"),
    ]
    assert expected == events(SPANS[::-1], steps="exec.*|check")


def test_exception_that_passes_through_several_spans_counts_once() -> None:
    outer = span(1, "outer", status="error", seconds=9)
    middle = agent(2, "solver", seconds=7)
    middle = msgspec.structs.replace(middle, status="error", parent_id="s1")
    inner = span(3, "inner", status="error", parent="s2")
    failing = tool(5, status="error", parent="s6")
    around = span(6, "around", status="error", seconds=0)
    assert [("exception", "s3"), ("tool_error", "s5")] == events([outer, middle, inner, failing, around])


def crashed(*, message: str = "", seconds: int = 20, number: int = 0, **fields: Any) -> Span:
    return span(number, "solve", status="error", seconds=seconds, message=message, **fields)


def test_operation_that_its_model_call_ended_is_an_exception() -> None:
    failed = msgspec.structs.replace(
        chat(2, None, parent="s1", status_code=500, error="busy"), status="error", status_message="busy"
    )
    inner = crashed(number=1, parent="s0", message="busy", seconds=5)
    outer = crashed(message="busy")
    assert [("exception", "s1")] == events([outer, inner, failed])


def test_operation_that_went_on_after_a_failure_fails_by_itself() -> None:
    handled = tool(1, status="error", parent="s0", message="no index")
    assert [("exception", "s0"), ("tool_error", "s1")] == events([crashed(message="no answer"), handled])
    # Without words, a later model call says that the agent went on.
    silent = tool(1, status="error", parent="s0")
    deep = chat(4, None, parent="s3")
    assert [("exception", "s0"), ("tool_error", "s1")] == events(
        [crashed(), silent, span(3, "retry", parent="s0", seconds=2), deep]
    )
    of_framework = msgspec.structs.replace(chat(4, None), attributes={semconv.FRAMEWORK_SPAN_ID: "s0"})
    assert [("exception", "s0"), ("tool_error", "s1")] == events([crashed(), silent, of_framework])
    before = span(0, "chats", parent="s9"), chat(1, None, parent="s0"), tool(3, status="error", parent="s9")
    assert [("tool_error", "s3")] == events([crashed(number=9, seconds=1), *before])


def test_error_that_was_raised_anew_is_that_of_the_innermost_span() -> None:
    trace = "ValueError: no table\n\nThe above exception was the direct cause ...\nRuntimeError: step 3 failed"
    event = SpanEvent(name="exception", time_ns=1, attributes={"exception.stacktrace": trace})
    outer = msgspec.structs.replace(crashed(message="step 3 failed"), events=(event,))
    inner = span(1, "query", status="error", parent="s0", message="no table")
    assert [("exception", "s1")] == events([outer, inner])
    bare = span(1, "query", status="error", parent="s0", attributes={semconv.ERROR_TYPE: "ValueError"})
    assert [("exception", "s1")] == events([outer, bare])


def test_late_spans_and_failed_model_calls_earn_nothing() -> None:
    late = msgspec.structs.replace(tool(1), is_late=True)
    failed = chat(2, None, retry_count=1, status_code=500, error="busy")
    assert [] == events([late, failed])


def test_turn_gets_the_sum_of_what_happened_because_of_it() -> None:
    weights = {"tool_ok": 0.25, "tool_error": -0.5, "repeat": -0.125, "retry": -1.0}
    rewards = several(SpanRewards(weights=weights), {}, SPANS)
    assert [("s1", 0.25 - 0.5 - 0.125), ("s4", 0.25 - 1.0)] == [(reward.span_id, reward.value) for reward in rewards]
    assert {("turn", "spans", "evaluator")} == {(reward.scope, reward.name, reward.source) for reward in rewards}
    assert {"tool_ok": 0.25, "tool_error": -0.5, "repeat": -0.125} == rewards[0].dimensions


def test_parallel_tools_of_one_turn_all_count() -> None:
    spans = [chat(1, None), tool(2, "a"), tool(2, "b"), tool(2, "c", status="error")]
    spans = [msgspec.structs.replace(item, span_id=f"p{index}") for index, item in enumerate(spans)]
    (reward,) = several(SpanRewards(weights={"tool_ok": 1.0, "tool_error": -0.5}), {}, spans)
    assert ("p0", 1.5) == (reward.span_id, reward.value)


def test_tool_belongs_to_the_turn_of_its_own_agent() -> None:
    spans = [
        agent(0, "a", seconds=20),
        chat(1, None, parent="s0"),
        agent(2, "b", seconds=20),
        chat(3, None, parent="s2"),
        tool(4, parent="s0"),
    ]
    (reward,) = several(SpanRewards(), {}, spans)
    assert ("s1", 0.1) == (reward.span_id, reward.value)


@pytest.mark.parametrize("scope", ["turn", "span"])
def test_credit_per_turn_uses_them(scope: Any) -> None:
    rewards = several(
        SpanRewards(weights={"tool_ok": 1.0, "tool_error": -1.0, "step_ok": 2.0}, steps="execute", scope=scope),
        {},
        SPANS,
    )
    recorded = [reward_span(20 + number, reward) for number, reward in enumerate(rewards)]
    final = reward_span(40, Reward(value=10.0, source="evaluator"))
    attempt = Attempt(attempt_id="r.1", rollout_id="r", number=1, worker="w", status="succeeded")
    spans = [tokens(item) for item in SPANS]
    episode = build_episode(rollout({}), attempt, [*spans, *recorded, final])
    (credits,) = TurnCredit().assign([episode])
    assert 10.0 == episode.reward
    assert [("s1", 0.0), ("s4", 3.0), ("s13", 0.0)] == [(c.span_id, c.reward or 0.0) for c in episode.transitions]
    assert {"s1": 13.0, "s4": 13.0, "s13": 10.0} == {credit.span_id: credit.value for credit in credits}


def reward_span(number: int, reward: Reward) -> Span:
    return msgspec.structs.replace(span(number, "evaluate"), reward=reward)


def tokens(item: Span) -> Span:
    if item.call is None:
        return item
    ids = {"prompt_ids": b"\1\0\0\0", "response_ids": b"\2\0\0\0", "logprobs": b"\0\0\0\0"}
    return msgspec.structs.replace(item, call=msgspec.structs.replace(item.call, **ids))


def test_rollout_gets_one_reward_with_all_kinds() -> None:
    weights = {"tool_ok": 1.0, "tool_error": -1.0, "exception": -0.5, "step_error": -0.25}
    (reward,) = several(SpanRewards(weights=weights, steps="execute", scope="rollout"), {}, SPANS)
    assert {"tool_ok": 2.0, "tool_error": -1.0, "exception": -0.5, "step_error": -0.25} == reward.dimensions
    assert (0.25, "rollout") == (reward.value, reward.scope)
    assert (
        "tool_error search: no index; step_error execute: no table; exception exception ValueError" == reward.feedback
    )


def test_empty_run_has_no_turns_and_a_rollout_of_zero() -> None:
    assert [] == several(SpanRewards(), {}, [])
    assert [0.0] == [reward.value for reward in several(SpanRewards(scope="rollout"), {}, [])]


@pytest.mark.parametrize(
    "params", [{"weights": {"tool": 1.0}}, {"weights": {"step_ok": 1.0}}, {"steps": "("}, {"scope": "call"}]
)
def test_parameters_that_mean_nothing_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        SpanRewards(**params)
