"""The functions that instrumented code calls, inside and outside of a rollout."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest

from agl import emit_exception, emit_message, emit_object, emit_observation, emit_reward, operation, semconv
from agl.errors import CaptureError
from agl.schemas import Reward, Span, decode, encode
from agl.tracing import ActiveAttempt, SpanRecorder, activate, current, make_reward_span

ROOT = "1" * 16


@pytest.fixture
def recorder() -> Iterator[SpanRecorder]:
    recorder = SpanRecorder()
    capture = ActiveAttempt(
        rollout_id="ro-1", attempt_id="ro-1.1", trace_id="a" * 32, root_span_id=ROOT, record=recorder.record
    )
    with activate(capture):
        yield recorder


def only(recorder: SpanRecorder) -> Span:
    spans = recorder.drain()
    assert len(spans) == 1
    return spans[0]


@pytest.mark.parametrize(
    ("value", "expected"), [(1.0, 1.0), (0, 0.0), (True, 1.0), (Fraction(1, 2), 0.5), (None, None)]
)
def test_emit_reward_records_the_number(recorder: SpanRecorder, value: Any, expected: float | None):
    before = time.time_ns()
    emit_reward(value, name="goal", feedback="why")
    span = only(recorder)
    assert Reward(value=expected, name="goal", feedback="why") == span.reward
    assert (ROOT, "a" * 32, "ro-1", "ro-1.1") == (span.parent_id, span.trace_id, span.rollout_id, span.attempt_id)
    assert before <= span.start_ns <= span.end_ns <= time.time_ns()
    assert span.attributes[semconv.EVALUATION_NAME] == "goal"


def test_emit_reward_takes_dimensions(recorder: SpanRecorder):
    emit_reward({"syntax": 1, "goal": None})
    assert Reward(value=None, dimensions={"syntax": 1.0, "goal": None}) == only(recorder).reward
    emit_reward({"syntax": 1, "goal": 0.5}, primary="goal")
    assert Reward(value=0.5, dimensions={"syntax": 1.0, "goal": 0.5}) == only(recorder).reward
    emit_reward({"only": 0.25})
    assert Reward(value=0.25, dimensions={"only": 0.25}) == only(recorder).reward


def test_emit_reward_says_what_it_is_about(recorder: SpanRecorder):
    emit_reward(1.0, scope="turn")
    assert Reward(value=1.0, scope="turn") == only(recorder).reward
    emit_reward(1.0, scope="span", span_id="b" * 16)
    assert Reward(value=1.0, scope="span", span_id="b" * 16) == only(recorder).reward


@pytest.mark.parametrize(
    ("value", "options", "said"),
    [
        ("abc", {}, "'abc'"),
        (object(), {}, "object"),
        (math.nan, {}, "nan"),
        (math.inf, {}, "inf"),
        ({"goal": math.nan}, {}, "'goal'"),
        ({"goal": 1.0}, {"primary": "gaol"}, "'gaol'"),
        (1.0, {"scope": "episode"}, "'episode'"),
        (1.0, {"scope": "span"}, "span_id"),
    ],
)
def test_emit_reward_refuses_what_is_no_reward(recorder: SpanRecorder, value: Any, options: dict[str, Any], said: str):
    with pytest.raises(CaptureError, match=said):
        emit_reward(value, **options)
    assert recorder.drain() == []


def test_reward_span_made_by_hand_is_refused_where_it_enters(recorder: SpanRecorder):
    wrong = Reward(value=1.0, name="judge", dimensions={"goal": math.inf})
    with pytest.raises(
        CaptureError, match=r"^'goal' of the reward 'judge' of rollout 'ro-1' is inf; pass a finite number"
    ):
        make_reward_span("ro-1", "ro-1.1", wrong)
    made = Span(rollout_id="ro-1", attempt_id="ro-1.1", span_id="b" * 16, name="mine", reward=wrong)
    with pytest.raises(CaptureError, match="inf as 'goal'"):
        current().add(made)  # pyright: ignore[reportOptionalMemberAccess]  # the fixture opened one
    assert recorder.drain() == []


@pytest.mark.parametrize("value", [10**400, {"goal": 10**400}], ids=["scalar", "dimension"])
def test_emit_reward_refuses_a_number_beyond_floats(recorder: SpanRecorder, value: Any):
    with pytest.raises(CaptureError, match="is not a finite number"):
        emit_reward(value)
    assert recorder.drain() == []


def test_emitted_values_that_no_store_carries_become_text(recorder: SpanRecorder):
    emit_object({"n": 2**70, "least": -(2**63), "most": 2**64 - 1})
    emit_message("half \ud83d", **{"\udcff": [2**70]})
    emit_observation(role="planner", content=("\udcff", 2**20_000))
    emit_exception(ValueError("bad \udcff path"))
    emit_reward(1.0, name="\udcff", feedback="half \ud83d")
    spans = recorder.drain()
    assert spans == [decode(encode(span), Span) for span in spans]
    thing, message, observation, exception, reward = spans
    expected = {"n": "1180591620717411303424", "least": -(2**63), "most": 2**64 - 1}
    assert expected == thing.attributes[semconv.OBJECT]
    assert {semconv.MESSAGE: "half \\ud83d", "\\udcff": ["1180591620717411303424"]} == message.attributes
    assert "\\udcff" == observation.attributes[semconv.OBSERVATION_CONTENT][0]
    assert "bad \\udcff path" == exception.status_message
    assert Reward(value=1.0, name="\\udcff", feedback="half \\ud83d") == reward.reward


class Measured(float):
    """A number type other than ``float``, as NumPy has them."""


def test_reward_span_carries_numbers_of_other_classes():
    given = Reward(value=Measured(0.5), dimensions={"goal": Measured(1), "\udcff": None}, weights={"goal": Measured(2)})
    span = make_reward_span("ro-1", "ro-1.1", given)
    assert Reward(value=0.5, dimensions={"goal": 1.0, "\\udcff": None}, weights={"goal": 2.0}) == span.reward
    assert span == decode(encode(span), Span)
    with pytest.raises(
        CaptureError, match=r"the reward 'judge' of rollout 'ro-1' is <object .* \(object\); pass a number"
    ):
        make_reward_span("ro-1", "ro-1.1", Reward(value=object(), name="judge"))  # pyright: ignore[reportArgumentType]


def test_emit_observation_records_role_and_content(recorder: SpanRecorder):
    emit_observation(role="planner", content={"board": [1, 2]})
    span = only(recorder)
    assert span.attributes == {semconv.OBSERVATION_ROLE: "planner", semconv.OBSERVATION_CONTENT: {"board": [1, 2]}}


def test_emit_observation_copies_its_content(recorder: SpanRecorder):
    board = [1, 2]
    emit_observation(role="planner", content=board)
    board.append(3)
    assert only(recorder).attributes[semconv.OBSERVATION_CONTENT] == [1, 2]


def test_emit_message_and_object_record_their_content(recorder: SpanRecorder):
    emit_message("hello", step=1)
    span = only(recorder)
    assert ({semconv.MESSAGE: "hello", "step": 1}, "unset") == (span.attributes, span.status)
    assert ROOT == span.parent_id
    assert span.start_ns == span.end_ns
    emit_object({"answer": (1, 2)}, name="plan")
    span = only(recorder)
    assert ("object plan", {"answer": [1, 2]}) == (span.name, span.attributes[semconv.OBJECT])


def test_attributes_may_have_the_names_of_parameters(recorder: SpanRecorder):
    emit_message("hello", message="m")
    emit_object(1, value="v")
    emit_exception(ValueError("bad"), error="e")
    message, value, error = recorder.drain()
    assert ("m", "v", "e") == (message.attributes["message"], value.attributes["value"], error.attributes["error"])


def test_emit_object_refuses_what_json_cannot_carry(recorder: SpanRecorder):
    with pytest.raises(CaptureError, match="JSON cannot carry"):
        emit_object(object())
    assert recorder.drain() == []


def test_message_that_is_no_text_and_error_that_is_no_exception_are_recorded_as_text(recorder: SpanRecorder):
    emit_message(3)  # type: ignore[arg-type]
    emit_exception("boom")  # type: ignore[arg-type]
    message, error = recorder.drain()
    assert ("3", "error", "boom") == (message.attributes[semconv.MESSAGE], error.status, error.status_message)


def test_emit_exception_records_type_message_and_traceback(recorder: SpanRecorder):
    try:
        raise ValueError("bad input")
    except ValueError as error:
        emit_exception(error, tool="calc")
    span = only(recorder)
    assert ("error", "bad input") == (span.status, span.status_message)
    assert {semconv.ERROR_TYPE: "ValueError", "tool": "calc"} == span.attributes
    assert "test_emitters.py" in span.events[0].attributes["exception.stacktrace"]


def test_emitted_text_holds_no_credentials(recorder: SpanRecorder):
    token, key = "agl_abcdefghij.klmnopqrst", "sk-proj-abcdefghijklmnop"
    emit_message(f"token {token}", key=key)
    emit_object({"nested": [token]})
    emit_observation(role="x", content=f"Authorization: Bearer {key}")
    emit_exception(RuntimeError(key))
    emit_reward(1.0, feedback=f"used {token}")
    with operation("call", key=key):
        pass
    text = repr(recorder.drain())
    assert token not in text
    assert key not in text


def test_operation_is_the_parent_of_what_happens_inside(recorder: SpanRecorder):
    with operation("outer", step=1) as outer:
        with operation("inner"):
            emit_message("deep")
        outer.set(found=2)
    message, inner, top = recorder.drain()
    assert (inner.span_id, top.span_id, ROOT) == (message.parent_id, inner.parent_id, top.parent_id)
    assert ("outer", {"step": 1, "found": 2}, "ok") == (top.name, top.attributes, top.status)
    assert top.start_ns <= inner.start_ns <= inner.end_ns <= top.end_ns


def test_operation_records_an_exception_and_lets_it_through(recorder: SpanRecorder):
    with pytest.raises(ValueError, match="bad"), operation("failing"):
        raise ValueError("bad")
    span = only(recorder)
    assert ("error", "bad", "ValueError") == (span.status, span.status_message, span.attributes[semconv.ERROR_TYPE])
    emit_message("after")
    assert only(recorder).parent_id == ROOT


def test_operation_decorates_functions(recorder: SpanRecorder):
    @operation("add", kind="tool")
    def add(a: int, b: int) -> int:
        """Sum."""
        return a + b

    assert add(1, b=2) == 3
    assert add(3, 4) == 7
    assert ("add", "Sum.") == (add.__name__, add.__doc__)
    assert ["add", "add"] == [span.name for span in recorder.drain()]


def test_operation_decorates_coroutines_that_run_at_once(recorder: SpanRecorder):
    @operation("wait")
    async def wait(turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        emit_message(str(turns))

    async def run() -> None:
        async with operation("both") as both:
            await asyncio.gather(wait(2), wait(1))
            assert both.span_id is not None

    asyncio.run(run())
    spans = {span.span_id: span for span in recorder.drain()}
    messages = [span for span in spans.values() if span.name == "message"]
    assert ["1", "2"] == [span.attributes[semconv.MESSAGE] for span in messages]
    assert ["wait", "wait"] == [spans[span.parent_id or ""].name for span in messages]
    assert len({span.parent_id for span in messages}) == 2


def test_operation_refuses_to_decorate_generators():
    with pytest.raises(CaptureError, match="generator"):

        @operation("stream")
        def stream() -> Iterator[int]:
            yield 1


def test_operation_around_a_generator_survives_its_close(recorder: SpanRecorder):
    def numbers() -> Iterator[int]:
        with operation("numbers"):
            yield 1
            yield 2

    stream = numbers()
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert only(recorder).status == "ok"


def test_emitters_do_nothing_outside_a_rollout():
    emit_reward("abc")  # type: ignore[arg-type]
    emit_reward(math.nan)
    emit_observation(role="x", content=object())
    emit_message(3)  # type: ignore[arg-type]
    emit_object(object())
    emit_exception("boom")  # type: ignore[arg-type]
    with operation("x") as one:
        assert one.span_id is None


class Hostile:
    """A value that raises when it is converted to text."""

    def __str__(self) -> str:
        raise ZeroDivisionError("hostile")


REPORTS: dict[str, Callable[[], object]] = {
    "reward": lambda: emit_reward({"goal": 1.0}, primary="goal", feedback="why"),
    "observation": lambda: emit_observation(role="planner", content={"board": Hostile()}),
    "message": lambda: emit_message("hello", seen=Hostile()),
    "object": lambda: emit_object({"a": 1}, seen=Hostile()),
    "exception": lambda: emit_exception(ValueError("bad"), seen=Hostile()),
    "operation": lambda: operation("step", seen=Hostile())(lambda: None)(),
}


class Broken:
    """A recorder and a tracer whose methods all raise."""

    def __getattr__(self, name: str) -> Any:
        def broken(*_: Any) -> Any:
            raise OSError(f"{name} is broken")

        return broken


def broken_attempt() -> ActiveAttempt:
    broken = Broken()
    return ActiveAttempt(
        rollout_id="ro-1",
        attempt_id="ro-1.1",
        trace_id="a" * 32,
        root_span_id=ROOT,
        record=broken.record,
        tracers=(broken,),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_a_recorder_and_a_tracer_that_fail_never_reach_the_agent(
    report: Callable[[], object], caplog: pytest.LogCaptureFixture
):
    with activate(broken_attempt()):
        report()
    said = {str(record.exc_info[1]) for record in caplog.records if record.exc_info}
    assert {"record is broken", "current_span_id is broken"} == said


def test_operation_passes_the_agents_own_exception_on_where_recording_fails(caplog: pytest.LogCaptureFixture):
    error = ValueError("agent")
    with activate(broken_attempt()), pytest.raises(ValueError, match="agent") as caught, operation("step"):
        raise error
    assert caught.value is error
    assert error.__context__ is None
    assert "record is broken" in caplog.text


def test_operation_takes_attributes_of_any_kind(recorder: SpanRecorder):
    with operation("step", seen=Hostile(), name="n", error=1, about=2, parent=3) as step:
        step.set(attempt=4)
    text = "<Hostile: its __str__ raised>"
    assert {"seen": text, "name": "n", "error": 1, "about": 2, "parent": 3, "attempt": 4} == only(recorder).attributes


def test_operation_that_began_outside_records_nothing_inside():
    recorder = SpanRecorder()
    outer = operation("outside")
    outer.__enter__()
    capture = ActiveAttempt(
        rollout_id="ro-1", attempt_id="ro-1.1", trace_id="a" * 32, root_span_id=ROOT, record=recorder.record
    )
    with activate(capture):
        outer.__exit__(None, None, None)
    assert recorder.drain() == []
