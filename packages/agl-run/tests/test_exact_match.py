from typing import Any

import msgspec
import pytest

from agl import semconv
from agl.contracts import RewardEmitter
from agl.errors import ConfigError
from agl.schemas import Rollout, Span
from agl_run.builtin import ExactMatch
from agl_testing.conformance.reward import RewardConformance
from tests.cases import call_span


class TestExactMatch(RewardConformance):
    @pytest.fixture
    def emitter(self) -> RewardEmitter:
        return ExactMatch()


def chat(number: int, text: str | None, **fields: Any) -> Span:
    response = {"choices": [{"message": {"role": "assistant", "content": text}}]}
    request = {"messages": [{"role": "user", "content": "question"}]}
    return with_bodies(call_span(number, **fields), request, response)


def with_bodies(span: Span, request: object, response: object) -> Span:
    assert span.call is not None
    return msgspec.structs.replace(span, call=msgspec.structs.replace(span.call, request=request, response=response))


def rollout(task: object) -> Rollout:
    return Rollout(rollout_id="r", task=task, hidden=("answer",))


def test_exact_match_compares_with_the_hidden_answer() -> None:
    reward = ExactMatch()(rollout({"question": "?", "answer": 42}), [chat(1, "  42 ")])
    assert (1.0, "evaluator", "rollout", "") == (reward.value, reward.source, reward.scope, reward.feedback)


def test_exact_match_says_what_it_expected() -> None:
    reward = ExactMatch()(rollout({"answer": "Paris"}), [chat(1, "Rome")])
    assert (0.0, "expected 'Paris', got 'Rome'") == (reward.value, reward.feedback)


def test_exact_match_without_any_answer_is_zero() -> None:
    assert 0.0 == ExactMatch()(rollout({"answer": "x"}), []).value


def test_exact_match_judges_what_the_agent_returned_only_if_no_model_answered() -> None:
    returned = msgspec.structs.replace(chat(0, None), call=None, attributes={semconv.OUTPUT: "42"})
    embedded = with_bodies(call_span(1, dialect="embeddings"), {"input": "x"}, {"data": []})
    failed, late = chat(2, "failed", status_code=500), chat(3, "late", is_late=True)
    assert 1.0 == ExactMatch()(rollout({"answer": 42}), [returned, embedded, failed, late]).value
    assert 0.0 == ExactMatch()(rollout({"answer": 42}), [returned, chat(1, "41")]).value
    assert 0.0 == ExactMatch()(rollout({"answer": 42}), [returned, chat(1, "")]).value


def test_exact_match_takes_any_of_several_answers() -> None:
    assert 1.0 == ExactMatch()(rollout({"answer": ["NYC", "new  york"]}), [chat(1, "New York")]).value


def test_exact_match_can_tell_case_and_name() -> None:
    reward = ExactMatch(case=True, name="em", answer="gold")(rollout({"gold": "a"}), [chat(1, "A")])
    assert (0.0, "em") == (reward.value, reward.name)


@pytest.mark.parametrize("task", [{"question": "?"}, "text", {"answer": None}, {"answer": []}])
def test_exact_match_refuses_a_task_without_an_answer(task: object) -> None:
    with pytest.raises(ConfigError, match="compares with the task's 'answer', which rollout r does not have"):
        ExactMatch()(rollout(task), [])
