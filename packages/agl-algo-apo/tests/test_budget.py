"""A budget is never exceeded, whatever is requested."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_algo_apo.apo import APO
from agl_algo_apo.search.budget import Budget, BudgetExhaustedError, BudgetLimits, Prices, Spent
from agl_algo_apo.search.settings import SearchSettings, spending_plan

ORDERS = st.lists(
    st.one_of(
        st.tuples(st.just("rollouts"), st.integers(0, 40), st.just(0), st.just(0.0)),
        st.tuples(st.just("call"), st.integers(0, 3000), st.integers(1, 3000), st.floats(0, 1)),
        st.tuples(st.just("release"), st.just(0), st.just(0), st.just(0.0)),
    ),
    max_size=40,
)


@given(
    orders=ORDERS,
    rollouts=st.integers(0, 100) | st.none(),
    calls=st.integers(0, 10) | st.none(),
    tokens=st.integers(0, 20_000) | st.none(),
    money=st.floats(0, 0.2) | st.none(),
    kept=st.integers(0, 20),
)
def test_no_order_of_spending_exceeds_a_limit(orders: Any, kept: int, **limits: Any) -> None:
    budget = Budget(BudgetLimits(**limits, prices=Prices(input=1.0, output=5.0, rollout=0.001)), kept=kept)
    started = 0
    for kind, first, second, share in orders:
        try:
            if kind == "rollouts":
                budget.take_rollouts(first)
                started += first
            elif kind == "release":
                budget.release()
            else:
                paid = budget.take_call(max_input=first, max_output=second)
                budget.settle_call(paid, input_tokens=int(first * share), output_tokens=int(second * share))
        except BudgetExhaustedError:
            continue
    spent = budget.spent
    assert started == spent.rollouts
    for name, limit in limits.items():
        assert limit is None or getattr(spent, name) <= limit + 1e-6


def test_rollouts_that_are_held_back_can_be_used_after_the_release() -> None:
    budget = Budget(BudgetLimits(rollouts=10), kept=4)
    budget.take_rollouts(6)
    with pytest.raises(BudgetExhaustedError, match="rollouts needed: 1, and left in the budget: 0"):
        budget.take_rollouts(1)
    budget.release()
    budget.take_rollouts(4)
    assert 10 == budget.spent.rollouts


def test_refused_reservation_costs_nothing_and_an_unused_part_comes_back() -> None:
    budget = Budget(BudgetLimits(tokens=1000))
    paid = budget.take_call(max_input=500, max_output=400)
    with pytest.raises(BudgetExhaustedError):
        budget.take_call(max_input=500, max_output=400)
    budget.settle_call(paid, input_tokens=50, output_tokens=30)
    budget.take_call(max_input=500, max_output=400)
    assert (2, 980) == (budget.spent.calls, budget.spent.tokens)


def test_cancelled_call_gives_back_all_that_was_reserved() -> None:
    budget = Budget(BudgetLimits(calls=1, tokens=900, money=0.01, prices=Prices(input=1.0, output=5.0)))
    budget.cancel_call(budget.take_call(max_input=500, max_output=400))
    assert Spent() == budget.spent
    budget.take_call(max_input=500, max_output=400)


def test_saved_budget_continues() -> None:
    budget = Budget(BudgetLimits(rollouts=10))
    budget.take_rollouts(7)
    other = Budget(BudgetLimits(rollouts=10))
    other.load(budget.dump())
    assert 3 == other.rollouts_left()


@pytest.mark.parametrize("limits", [{"rollouts": -1}, {"money": -0.5}])
def test_negative_limit_is_refused(limits: Any) -> None:
    with pytest.raises(msgspec.ValidationError, match=">= 0"):
        msgspec.convert({**limits, "prices": {"rollout": 1.0}}, BudgetLimits)


@pytest.mark.parametrize("preset", ["light", "medium", "heavy"])
def test_preset_becomes_limits(preset: Any) -> None:
    settings = SearchSettings(optimizer="x", budget=preset)
    plan = spending_plan(settings, tasks=40, val=32, after=4, calls=2, algorithm="apo")
    assert plan.limits.rollouts
    assert plan.limits.calls
    assert "plan: at most" in plan.words


def test_size_of_a_run_is_the_budget_in_rollouts() -> None:
    context: Any = SimpleNamespace(train=[None] * 40, val=[None] * 32, validation=4)
    plan = spending_plan(SearchSettings(optimizer="x"), tasks=40, val=32, after=4, calls=1, algorithm="apo")
    assert (plan.limits.rollouts, 0) == APO(optimizer="x").run_size(context)
    assert (400, 7) == APO(optimizer="x", budget=400, beam_rounds=7).run_size(context)
    assert (0, 0) == APO(optimizer="x", budget=BudgetLimits(calls=50)).run_size(context)


def test_presets_grow() -> None:
    plans = [
        spending_plan(
            SearchSettings(optimizer="x", budget=p), tasks=40, val=32, after=4, calls=2, algorithm="apo"
        ).limits
        for p in ("light", "medium", "heavy")
    ]
    assert sorted(p.rollouts or 0 for p in plans) == [p.rollouts for p in plans]
