"""Lessons have the failures, feedback and siblings in a trace, and never a hidden field."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl import semconv
from agl.schemas import Episode, ModelCall, Reward, Rollout, Span
from agl_algo_torch.data.feedback import MASKED, HiddenFields, find_feedback, find_sibling

TASK = {"question": "What is 6*7?", "answer": "forty-two", "tests": "assert solve(6, 7) == 42\nassert solve(0, 7) == 0"}


def episode_of(*rewards: Reward, name: str = "r", reward: float | None = 0.0, **rollout: Any) -> Episode:
    settings = {"task": TASK, "hidden": ("answer", "tests"), **rollout}
    return Episode(
        rollout=Rollout(rollout_id=name, group_id="g", **settings), attempt=None, reward=reward, rewards=rewards
    )


def said(episode: Episode, *spans: Span, sources: tuple[str, ...] = ("tools", "rewards")) -> str:
    return find_feedback(episode, spans, sources=sources, clean=str.strip)


def words(text: str, source: Any = "evaluator") -> Reward:
    return Reward(value=0.0, source=source, feedback=text)


def tool_span(status: str = "error", message: str = "no table users", **fields: Any) -> Span:
    attributes = {semconv.OPERATION: semconv.OP_EXECUTE_TOOL, semconv.TOOL_NAME: "sql"}
    settings = {"span_id": "t", "name": "execute_tool sql", "status_message": message, **fields}
    return Span(rollout_id="r", attempt_id="r.1", attributes=attributes, status=status, **settings)  # type: ignore[arg-type]


def call_span(*results: str) -> Span:
    messages = [{"role": "tool", "tool_call_id": "c", "content": result} for result in results]
    call = ModelCall(request_id="q", dialect="chat", model="m", request={"messages": messages})
    return Span(rollout_id="r", attempt_id="r.1", span_id="c", name="chat m", call=call)


def test_words_of_rewards_are_reported_once_each() -> None:
    assert "too long\n\nno tool was used" == said(
        episode_of(words("too long"), words("no tool was used"), words("too long"))
    )


def test_what_an_agent_says_about_itself_is_not_told() -> None:
    assert not said(episode_of(words("I did well", "agent")))


def test_tools_that_failed_are_told_from_spans_and_from_messages() -> None:
    spans = [tool_span(), tool_span("ok", "", span_id="u"), call_span("Error: no rows", "3 errors were repaired")]
    assert "sql: no table users\n\nError: no rows" == said(episode_of(), *spans)


def test_only_the_chosen_sources_are_read() -> None:
    episode = episode_of(words("too long"))
    assert "too long" == said(episode, tool_span(), sources=("rewards",))
    assert "sql: no table users" == said(episode, tool_span(), sources=("tools",))
    assert not said(episode, tool_span(), sources=("siblings",))


def test_late_spans_are_not_read() -> None:
    assert not said(episode_of(), tool_span(is_late=True))


def test_hidden_values_are_masked_in_words_and_in_errors() -> None:
    found = said(
        episode_of(words("expected 'Forty-Two', got 'six'")), tool_span(message="AssertionError: solve(0, 7) == 0")
    )
    assert f"expected '{MASKED}', got 'six'" in found
    assert "solve" not in found


def test_remark_that_is_hidden_altogether_is_left_out() -> None:
    assert not said(episode_of(words("forty-two")))


def test_visible_fields_are_not_masked() -> None:
    assert "the question was What is 6*7?" == said(
        episode_of(words("the question was What is 6*7?"), hidden=("answer",))
    )


def test_part_of_a_hidden_test_is_masked() -> None:
    hidden = HiddenFields(TASK, ("tests",))
    assert f"line 1: {MASKED}) failed" == hidden.masked("line 1: assert solve(6, 7) failed")


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 10**400, -2.5e300])
def test_numbers_of_any_size_are_masked(value: float) -> None:
    hidden = HiddenFields({"limit": value}, ("limit",))
    assert f"at most {MASKED} of them" == hidden.masked(f"at most {value} of them")


@pytest.mark.parametrize(
    ("value", "text", "expected"),
    [
        ("42", "got answer_41, expected answer_42", f"got answer_41, expected answer_{MASKED}"),
        (42, "41px, not 42px or x42", f"41px, not {MASKED}px or x{MASKED}"),
        (42, "420, 142 and 1042 are not it, 0042 is", f"420, 142 and 1042 are not it, {MASKED} is"),
        (3.5, "expected 3.50, not 3.51", f"expected {MASKED}, not 3.51"),
        (1234567, "expected 1_234_567", f"expected {MASKED}"),
        ("B", "choice_B, not AB or Bc", f"choice_{MASKED}, not AB or Bc"),
        ("東京", "答えは東京です", f"答えは{MASKED}です"),
        ("\uff14\uff12", "expected 42", f"expected {MASKED}"),
    ],
)
def test_short_values_are_masked_within_words_that_are_not_theirs(value: Any, text: str, expected: str) -> None:
    assert expected == HiddenFields({"answer": value}, ("answer",)).masked(text)


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
@pytest.mark.parametrize("written", ["NFC", "NFD"])
def test_values_are_masked_in_every_form_of_their_characters(form: Any, written: Any) -> None:
    hidden = HiddenFields({"answer": unicodedata.normalize(form, "Zürich, Köln")}, ("answer",))
    assert f"in {MASKED} it was" == hidden.masked(unicodedata.normalize(written, "in Zürich, Köln it was"))


values = st.recursive(
    st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Zs", "Zl", "Zp")), min_size=4, max_size=30)
    | st.integers(1000, 10**12)
    | st.floats(1000, 10**6, allow_nan=False),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3) | st.dictionaries(st.text(max_size=3), inner, min_size=1, max_size=3)
    ),
    max_leaves=4,
)


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in leaves(inner)]
    return [leaf for inner in value for leaf in leaves(inner)] if isinstance(value, list) else [value]


@settings(deadline=None)
@given(hidden=values, around=st.lists(st.sampled_from(["expected", " ", "'", ":", "was not", "\n", "_"]), min_size=2))
def test_no_hidden_value_is_ever_told(hidden: Any, around: list[str]) -> None:
    """It is masked in every spelling, and next to any other text."""
    written = [form for leaf in leaves(hidden) for form in (str(leaf), repr(leaf), json.dumps(leaf), str(leaf).upper())]
    remarks = [words(mark.join([around[0], form, around[-1]])) for form in written for mark in around]
    remarks.append(words(repr(hidden)))
    remarks.append(words(json.dumps(hidden)))
    told = said(episode_of(*remarks, task={"secret": hidden}, hidden=("secret",)))
    for leaf in leaves(hidden):
        assert str(leaf).strip().casefold() not in told.casefold() or str(leaf).strip() in MASKED


def is_plain(character: str) -> bool:
    return {"Lo"} == {unicodedata.category(part) for part in unicodedata.normalize("NFKD", character)}


letters = st.characters(codec="utf-8", categories=("Lo",)).filter(is_plain)
short_values = st.text(letters, min_size=1, max_size=3) | st.integers(0, 999)


@settings(deadline=None)
@given(
    hidden=short_values,
    before=st.sampled_from(["", "answer_", "x", "(", "=", "$"]),
    after=st.sampled_from(["", "px", "%", "."]),
)
def test_no_short_hidden_value_is_ever_told(hidden: Any, before: str, after: str) -> None:
    """It is masked next to letters if it is a number, and in scripts without spaces between words."""
    told = said(episode_of(words(f"it is {before}{hidden}{after}!"), task={"secret": hidden}, hidden=("secret",)))
    assert str(hidden) not in told


def test_sibling_is_the_best_of_the_others_that_succeeded() -> None:
    group = [episode_of(name=f"r{i}", reward=reward) for i, reward in enumerate([0.0, 1.0, None, 2.0, 2.0])]
    found = [find_sibling(group, index, success=1.0) for index in range(5)]
    assert ["r3", "r3", "r3", "r4", "r3"] == [one and one.rollout.rollout_id for one in found]
    assert find_sibling(group[:2], 1, success=1.0) is None


def test_sibling_has_the_same_task_where_a_group_has_several() -> None:
    tasks = [
        {"question": "6*7?", "kind": "sum"},
        {"kind": "sum", "question": "6*7?"},
        {"question": "8*9?", "kind": "sum"},
    ]
    group = [episode_of(name=f"r{i}", reward=float(i > 0), task=task) for i, task in enumerate(tasks)]
    assert group[1] is find_sibling(group, 0, success=1.0)
    assert find_sibling([group[0], group[2]], 0, success=1.0) is None
