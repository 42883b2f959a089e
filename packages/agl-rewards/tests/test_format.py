from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl.contracts import RewardEmitter
from agl.errors import ConfigError
from agl_rewards.format import Format
from agl_testing.conformance.reward import RewardConformance

from .cases import one


class TestFormat(RewardConformance):
    @pytest.fixture
    def emitter(self) -> RewardEmitter:
        return Format(pattern=r"^\d+$", max_length=10)


SHAPE = {"answer": "number", "steps": "array", "note": "any"}
GOOD = '{"answer": 42, "steps": [], "note": null}'


@pytest.mark.parametrize(
    ("params", "text", "value"),
    [
        ({"pattern": "^Answer: .*$"}, "Answer: 42", 1.0),
        ({"pattern": "a.*b"}, "a\nb", 1.0),
        ({"pattern": "^Answer: "}, "The Answer: 42", 0.0),
        ({"tags": ["think", "answer"]}, "<think>a</think> <answer>b</answer>", 1.0),
        ({"tags": ["think", "answer"]}, "<answer>b</answer><think>a</think>", 0.0),
        ({"tags": ["think"]}, "<think>a</think><think>b</think>", 0.0),
        ({"tags": ["think"]}, "<think>a", 0.0),
        ({"tags": ["a", "b"]}, "<a><b></b></a>", 0.0),
        ({"json": SHAPE}, GOOD, 1.0),
        ({"json": SHAPE}, f"Here:\n```json\n{GOOD}\n```", 1.0),
        ({"json": SHAPE}, GOOD.replace("42", "true"), 0.0),
        ({"json": SHAPE}, GOOD.replace("42", '"42"'), 0.0),
        ({"json": SHAPE}, '{"answer": 42}', 0.0),
        ({"json": SHAPE}, "[1]", 0.0),
        ({"json": {}}, "{", 0.0),
        ({"json": {"n": "integer", "o": "object", "b": "boolean"}}, '{"n": 1, "o": {}, "b": false}', 1.0),
        ({"json": {"n": "integer"}}, '{"n": 1.5}', 0.0),
        ({"json": {"n": "null", "s": "string"}}, '{"n": null, "s": ""}', 1.0),
        ({"max_length": 3}, "abc", 1.0),
        ({"max_length": 3}, "abcd", 0.0),
        ({"max_length": 3}, "", 0.0),
        ({"max_length": 3, "min_length": 0}, "", 1.0),
    ],
)
def test_format_is_kept_or_not(params: dict[str, Any], text: str, value: float) -> None:
    reward = one(Format(**params), {}, text)
    assert (value, "format") == (reward.value, reward.name)
    assert bool(reward.feedback) == (value == 0.0)


def test_every_check_is_a_dimension_and_has_its_feedback() -> None:
    reward = one(Format(tags=["a"], max_length=3, json={}), {}, "<a></a>")
    assert {"tags": 1.0, "json": 0.0, "length": 0.0} == reward.dimensions
    assert 0.0 == reward.value
    assert "the text is not JSON" in reward.feedback
    assert "the text has 7 characters, more than 3" in reward.feedback


def test_part_of_the_checks_can_count() -> None:
    assert 0.5 == one(Format(pattern="a", max_length=3, partial=True), {}, "abcd").value


@given(st.text())
def test_any_text_has_a_format_or_not(text: str) -> None:
    reward = one(Format(pattern="x", tags=["t"], json={"a": "any"}, max_length=5, partial=True), {}, text)
    assert reward.value == sum(reward.dimensions.values()) / 4  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "params", [{}, {"pattern": "("}, {"json": {"a": "text"}}, {"max_length": 3, "min_length": 4}, {"source": "x"}]
)
def test_parameters_that_mean_nothing_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Format(**params)
