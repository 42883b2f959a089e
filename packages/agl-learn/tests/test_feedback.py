"""What users do and say becomes a reward."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl import semconv
from agl.contracts import Recording, RewardEmitter
from agl.errors import ConfigError
from agl.schemas import ModelCall, Reward, Rollout, Span
from agl_learn.feedback.evidence import Evidence, evidence_of
from agl_learn.feedback.rating import Feedback, record, said_of
from agl_learn.feedback.signals import Found
from agl_learn.feedback.words import is_same_question
from agl_run import SignalSettings

ROLLOUT = Rollout(rollout_id="c", task={}, attempt_id="c.1", status="running")
SECOND = 1_000_000_000


def span(number: int, **fields: Any) -> Span:
    at = number * SECOND
    return Span(
        rollout_id="c", attempt_id="c.1", span_id=f"{number:016x}", sequence=number, start_ns=at, end_ns=at, **fields
    )


def call(number: int, *texts: str, answer: str | None = "", **fields: Any) -> Span:
    """A call whose prompt holds all turns so far, beginning with the user's."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    response = None if answer is None else {"choices": [{"message": {"role": "assistant", "content": answer}}]}
    request = {"messages": [{"role": "system", "content": "Be kind."}, *messages]}
    made = ModelCall(request_id=str(number), dialect="chat", model="m", request=request, response=response, **fields)
    return span(number, name="chat", call=made)


def rating(number: int, value: float | None, **fields: Any) -> Span:
    given: dict[str, Any] = {"source": "human", **fields}
    return span(number, name="evaluate", reward=Reward(value=value, **given))


def read(*spans: Span, until: float = 1e9, asked_next: str = "") -> Evidence:
    recording = Recording(rollout=ROLLOUT, attempts=[], spans=list(spans))
    return evidence_of(recording, until=until, asked_next=asked_next)


def reward(evidence: Evidence, *signals: str | SignalSettings) -> float | None:
    feedback = Feedback(signals)
    return feedback.reward(feedback.read(evidence))


def talk(*texts: str) -> Evidence:
    """A conversation with one call per answer."""
    ends = range(2, len(texts) + 1, 2)
    return read(*(call(at, *texts[: at - 1], answer=texts[at - 1]) for at in ends))


@pytest.mark.parametrize("value", [0.0, 0.25, 1.0])
def test_rating_by_a_person_counts_alone(value: float) -> None:
    evidence = read(call(1, "hi", answer="hello"), rating(2, value), rating(3, 1 - value, source="evaluator"))

    assert value == reward(evidence, "scores", "thumbs", "repeated-question")


def test_newest_rating_of_a_person_counts_and_may_be_taken_back() -> None:
    spans = call(1, "hi", answer="hello"), rating(2, 1.0), rating(3, 0.0)

    assert 0.0 == reward(read(*spans), "thumbs")
    assert reward(read(*spans, rating(4, None)), "thumbs") is None


def test_ratings_of_several_answers_are_averaged() -> None:
    about = [rating(number, value, scope="turn", span_id=f"{number:016x}") for number, value in ((3, 1.0), (4, 0.0))]

    assert 0.5 == reward(read(call(1, "hi", answer="hello"), *about), "thumbs")


@pytest.mark.parametrize(("stars", "expected"), [(1, 0.0), (3, 0.5), (5, 1.0), (9, 1.0), (-2, 0.0)])
def test_range_maps_stars_to_rewards(stars: float, expected: float) -> None:
    evidence = read(call(1, "hi", answer="hello"), rating(2, stars))

    assert expected == reward(evidence, SignalSettings(use="thumbs", range=(1, 5)))


def test_scores_read_late_batch_jobs_but_not_the_learner_or_the_agent() -> None:
    own = record(ROLLOUT, Reward(value=0.1))
    agent = rating(3, 0.9, source="agent")
    first = call(1, "hi", answer="hello")

    assert reward(read(first, own, agent), "scores") is None
    assert 0.7 == reward(
        read(first, own, agent, span(4, name="e", is_late=True, reward=Reward(value=0.7, source="evaluator"))), "scores"
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("How do I reset my password?", "how can I reset the password"),
        ("How do I reset my password?", "Resetting passwords?"),
        ("Where's my refund", "where is my refund??"),
        ("你好吗", "你好吗"),
    ],
)
def test_question_in_other_words_is_the_same(first: str, second: str) -> None:
    assert is_same_question(first, second)
    assert 0.0 == reward(talk(first, "an answer", second, "an answer"), "repeated-question")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("How do I reset my password?", "How do I close my account?"),
        ("Where is my refund?", "Thanks, what about the invoice for May?"),
        ("Where is order 1234?", "Where is order 1243?"),
        ("???", "!!!"),
        ("", ""),
    ],
)
def test_other_question_is_not_the_same(first: str, second: str) -> None:
    assert not is_same_question(first, second)
    assert 1.0 == reward(talk(first, "an answer", second, "an answer"), "repeated-question")


@given(st.text(max_size=40), st.text(max_size=40))
def test_sameness_of_questions_does_not_depend_on_their_order(first: str, second: str) -> None:
    assert is_same_question(first, second) == is_same_question(second, first)


def test_question_that_the_user_asks_again_next_time_is_repeated() -> None:
    evidence = read(call(1, "Where is my refund?", answer="Soon."), asked_next="where's my refund")
    feedback = Feedback(["repeated-question"])

    found = feedback.read(evidence)

    assert 0.0 == feedback.reward(found)
    assert "The user asked again: where's my refund" == said_of(evidence, found)


def test_several_calls_for_one_question_do_not_repeat_it() -> None:
    calls = call(1, "Where is my refund?", answer="billing"), call(2, "Where is my refund?", answer="On its way.")

    evidence = read(*calls)

    assert ["Where is my refund?"] == evidence.questions
    assert "On its way." == evidence.answer
    assert 1.0 == reward(evidence, "repeated-question")


def test_question_that_is_asked_twice_in_the_same_words_stays_two_turns() -> None:
    assert ["hi", "hi"] == talk("hi", "one", "hi", "two").questions


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("No, I meant the other account", 0.0),
        ("that\u2019s wrong", 0.0),
        ("It doesn't work", 0.0),
        ("THAT ISN'T RIGHT!", 0.0),
        ("No, thanks", 1.0),
        ("Great, I meaningfully agree", 1.0),
    ],
)
def test_reply_that_corrects_the_answer_counts_against_it(reply: str, expected: float) -> None:
    assert expected == reward(talk("Close my account", "Done.", reply, "Oh."), "correction")


def test_correction_needs_a_reply_and_reads_own_phrases() -> None:
    own = SignalSettings(use="correction", phrases=("das stimmt nicht",))

    assert reward(talk("that is wrong", "What is?"), "correction") is None
    assert 0.0 == reward(talk("Hallo", "Hallo!", "Das stimmt nicht.", "Oh."), own)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Which account do you mean?", 0.0),
        ("It is done. Which plan do you want?", 0.0),
        ("Done. Is there anything else?", 1.0),
        ("Did that help?", 1.0),
        ("You asked: why? Because it is late.", 1.0),
        ("", 1.0),
    ],
)
def test_leaving_without_a_reply_to_a_question_is_abandoning(answer: str, expected: float) -> None:
    assert expected == reward(read(call(1, "hi", answer=answer)), "abandoned")


def test_leaving_before_the_answer_is_complete_is_abandoning() -> None:
    assert 0.0 == reward(read(call(1, "hi", answer="It", is_complete=False)), "abandoned")


def test_conversation_that_goes_on_is_not_abandoned() -> None:
    assert reward(read(call(5, "hi", answer="Which?"), until=4.0), "abandoned") is None


def test_tool_errors_are_counted_from_spans_before_messages() -> None:
    tool = {semconv.OPERATION: semconv.OP_EXECUTE_TOOL}
    spans = [
        span(2, name="execute_tool a", attributes=tool, status="error", status_message="no such order"),
        span(3, name="execute_tool a", attributes=tool, status="ok"),
    ]
    evidence = read(call(1, "hi", answer="hello"), *spans)

    assert 0.5 == reward(evidence, "tool-errors")
    assert "A tool failed: no such order" == said_of(evidence, Feedback(["tool-errors"]).read(evidence))


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ("Error: timeout", 0.0),
        ('{"error": "no such order"}', 0.0),
        ("Traceback (most recent call last)", 0.0),
        ("42", 1.0),
        ("The error was fixed", 1.0),
    ],
)
def test_tool_messages_that_report_an_error_count_as_failures(result: str, expected: float) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "tool", "tool_call_id": "1", "content": result}]
    made = ModelCall(request_id="1", dialect="chat", model="m", request={"messages": messages}, response={})

    assert expected == reward(read(span(1, name="chat", call=made)), "tool-errors")


def test_implicit_signals_are_averaged_by_weight() -> None:
    evidence = talk("Where is my refund?", "Soon.", "Where is my refund?", "Soon.")

    assert 0.25 == reward(evidence, SignalSettings(use="repeated-question", weight=3), "abandoned", "tool-errors")


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 100)), min_size=1, max_size=3))
def test_mean_of_signals_lies_between_the_lowest_and_the_highest(given_: list[tuple[float, float]]) -> None:
    names = ["scores", "correction", "abandoned"][: len(given_)]
    feedback = Feedback(
        [SignalSettings(use=name, weight=weight) for name, (_, weight) in zip(names, given_, strict=True)]
    )

    found = feedback.reward({name: Found(value) for name, (value, _) in zip(names, given_, strict=True)})

    assert found is not None
    assert min(value for value, _ in given_) - 1e-9 <= found <= max(value for value, _ in given_) + 1e-9


def test_unknown_signal_is_refused_with_a_near_match() -> None:
    with pytest.raises(ConfigError, match=r"no signal 'thumb'; did you mean 'thumbs'\?$"):
        Feedback(["thumb"])
    with pytest.raises(ConfigError, match=r"choose from thumbs, .*, or name the use of a \[\[reward\]\]"):
        Feedback(["xyz"])


def test_signal_settings_that_do_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="reads no phrases"):
        Feedback([SignalSettings(use="thumbs", phrases=("no",))])
    with pytest.raises(ConfigError, match=r"range \[5, 1\]"):
        Feedback([SignalSettings(use="thumbs", range=(5, 1))])


def judged(emitter: RewardEmitter, *, later: Sequence[Span] = ()) -> tuple[float | None, list[Span]]:
    feedback = Feedback([SignalSettings(use="judge", range=(0, 10))], {"judge": emitter})
    evidence = read(call(1, "hi", answer="hello"), *later)
    found = feedback.read(evidence)
    spans = asyncio.run(feedback.judge(ROLLOUT, evidence.spans, found))
    return feedback.reward(found), spans


def test_judge_is_called_once_and_its_words_are_not_recorded() -> None:
    calls: list[str] = []

    def judge(rollout: Rollout, spans: Sequence[Span]) -> Reward:
        calls.append(rollout.rollout_id)
        return Reward(value=4.0, feedback="say please")

    value, spans = judged(judge)
    again, none = judged(judge, later=spans)

    assert (0.4, 0.4, [], ["c"]) == (value, again, none, calls)
    assert [Reward(value=4.0, name="judge", source="hook")] == [each.reward for each in spans]


def test_judge_that_fails_leaves_no_reward(caplog: pytest.LogCaptureFixture) -> None:
    def judge(rollout: Rollout, spans: Sequence[Span]) -> float:
        raise ValueError("no answer")

    assert (None, []) == judged(judge)
    assert ["the reward 'judge' of conversation c is left out: ValueError: no answer"] == caplog.messages


@pytest.mark.parametrize("answer", ["I can\u2019t help with that.", "I'm sorry, but I can't do this.", "I cannot say."])
def test_refusals_are_measured(answer: str) -> None:
    assert 1.0 == talk("hi", answer).numbers()["refusals"]
    assert 0.0 == talk("hi", answer, "please", "Sure.").numbers()["refusals"]


def test_latency_is_measured_for_each_question() -> None:
    evidence = read(
        call(1, "one", answer="a", latency_s=1.0),
        call(2, "one", answer="b", latency_s=2.0),
        call(3, "one", "b", "two", answer="c", latency_s=1.0),
    )

    assert {"latency": 2.0, "refusals": 0.0, "cost": 0.0, "length": 1.0} == evidence.numbers()


HOSTILE = [
    "\x00" * 50,
    "\u202e" * 50,
    "(" * 5_000,
    "no " * 50_000,
    "\ud800",
    "a" * 100_000,
    "?" * 10_000,
    "' OR 1=1 --",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_gives_a_reward_and_bounded_words(text: str) -> None:
    evidence = talk(text, text, text, text)
    signals = ["thumbs", "scores", "repeated-question", "correction", "abandoned", "tool-errors"]

    found = Feedback(signals).read(evidence)

    assert 0.0 <= (Feedback(signals).reward(found) or 0.0) <= 1.0
    assert len(said_of(evidence, found)) <= 4_000


def test_giant_conversation_is_read_whole() -> None:
    texts = [f"question {number} about order{number}" for number in range(601)]

    evidence = read(call(1, *texts, answer="the end"))

    assert 301 == len(evidence.questions)
    assert 1.0 == reward(evidence, "repeated-question", "correction", "abandoned")
