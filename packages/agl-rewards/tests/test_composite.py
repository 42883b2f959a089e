from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl.contracts import RewardEmitter, RewardSetup
from agl.errors import ConfigError, RunError
from agl.schemas import Reward
from agl_rewards.composite import Composite, CompositePart
from agl_testing.conformance.reward import RewardConformance

from .cases import chat, one, setup, several, tool


def composite(**parts: tuple[Any, float]) -> Composite:
    """Return a composite of emitters that return given rewards, with their weights."""
    made = RewardSetup(folder=setup().folder, policies={}, build=lambda _, params: lambda *_: params["says"])
    return Composite(
        parts={
            name: CompositePart(use="says", weight=weight, params={"says": says})
            for name, (says, weight) in parts.items()
        },
        setup=made,
    )


class TestComposite(RewardConformance):
    @pytest.fixture
    def emitter(self) -> RewardEmitter:
        parts = {
            "right": CompositePart(use="exact-match", weight=0.7),
            "short": CompositePart(use="format", weight=0.3, params={"max_length": 9}),
            "tools": CompositePart(use="spans", weight=0.0),
        }
        return Composite(parts=parts, setup=setup())


@given(st.dictionaries(st.text(min_size=1), st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=1, max_size=5))
def test_sum_is_weighted_and_parts_are_kept(parts: dict[str, Any]) -> None:
    reward = one(composite(**parts), {}, [])
    assert pytest.approx(sum(value * weight for value, weight in parts.values())) == reward.value
    assert {name: value for name, (value, _) in parts.items()} == reward.dimensions
    assert {name: weight for name, (_, weight) in parts.items()} == reward.weights


@given(
    st.dictionaries(
        st.text(min_size=1), st.tuples(st.none() | st.floats(-1, 1), st.sampled_from([0.0, 0.5])), min_size=1
    )
)
def test_value_is_missing_exactly_when_a_weighted_part_is(parts: dict[str, Any]) -> None:
    reward = one(composite(**parts), {}, [])
    assert (reward.value is None) == any(value is None and weight for value, weight in parts.values())


def test_part_counts_by_the_usual_rule_and_its_dimensions_are_kept() -> None:
    inner = [Reward(value=9.0, name="other"), Reward(value=0.5, dimensions={"a": 1.0, "b": None})]
    reward = one(composite(x=(inner, 2.0)), {}, [])
    assert (1.0, {"x": 0.5, "x.a": 1.0, "x.b": None}) == (reward.value, reward.dimensions)


def test_feedback_names_the_part() -> None:
    reward = one(composite(x=(Reward(value=0.0, feedback="bad"), 1.0), y=(1.0, 1.0)), {}, [])
    assert "x: bad" == reward.feedback


def test_part_that_is_not_finite_is_refused_by_its_name() -> None:
    with pytest.raises(RunError, match="the part 'x' of a composite reward returned nan"):
        one(composite(x=(float("nan"), 1.0), y=(1.0, 1.0)), {}, [])


def test_rewards_about_turns_pass_through_beside_the_sum() -> None:
    parts = {"right": CompositePart(use="exact-match", weight=1.0), "tools": CompositePart(use="spans", weight=0.0)}
    spans = [chat(1, None), tool(2), chat(3, "42")]
    total, turn = several(Composite(parts=parts, setup=setup()), {"answer": "42"}, spans)
    assert (1.0, {"right": 1.0, "tools": None}) == (total.value, total.dimensions)
    assert ("turn", "s1", 0.1) == (turn.scope, turn.span_id, turn.value)


def test_composite_of_composites() -> None:
    inner = {"right": {"use": "exact-match", "weight": 1.0}}
    parts = {"inner": CompositePart(use="composite", weight=0.5, params={"parts": inner})}
    reward = one(Composite(parts=parts, setup=setup()), {"answer": "42"}, "42")
    assert (0.5, {"inner": 1.0, "inner.right": 1.0}) == (reward.value, reward.dimensions)


def test_composite_without_an_experiment_is_refused() -> None:
    with pytest.raises(ConfigError, match="setup"):
        Composite(parts={"a": CompositePart(use="exact-match", weight=1.0)})


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_weight_that_is_not_finite_is_refused_by_the_name_of_its_part(weight: float) -> None:
    with pytest.raises(ConfigError, match=f"composite has the weight {weight} for part 'x'; give a finite number"):
        composite(x=(1.0, weight))
