"""Decides if a search that has ended can go on, by the reason for its end and its parameters of today."""

from collections.abc import Mapping

import msgspec

from agl.schemas import Json
from agl_algo_apo.search.budget import CURRENCIES, BudgetLimits, Spent
from agl_algo_apo.search.progress import SearchProgress
from agl_algo_apo.search.settings import SearchSettings, SpendingPlan, spending_plan

_OUTAGES = ("optimizer_unreachable", "optimizer_garbage", "infrastructure")


def has_more(settings: SearchSettings, state: Mapping[str, Json], *, tasks: int, calls: int, algorithm: str) -> bool:
    """Return whether an ended search can take further steps.

    It can after an outage, with a raised budget, with more rounds and with more patience, each as far as the budget
    has room for a step and another final measurement.

    Args:
        settings: The parameters that it has now.
        state: Its last state.
        tasks: Number of training tasks.
        calls: Questions to the optimiser's model per proposal.
        algorithm: The algorithm's name, for errors.

    Raises:
        ConfigError: The budget is less than the method needs at all.
    """
    progress = SearchProgress.load(state["progress"])
    plan = spending_plan(
        settings, tasks=tasks, val=state["val"], after=state["validation"], calls=calls, algorithm=algorithm
    )
    match progress.stop_reason:
        case "budget":
            is_over = not _is_raised(plan.limits, msgspec.convert(state["limits"], BudgetLimits))
        case "rounds":
            is_over = 0 < settings.beam_rounds <= progress.rounds
        case "patience":
            is_over = settings.patience <= progress.stale
        case reason:
            is_over = reason not in _OUTAGES
    return not is_over and _has_room(plan, msgspec.convert(state["spent"], Spent))


def _is_raised(now: BudgetLimits, before: BudgetLimits) -> bool:
    """Return whether any limit is higher than before, or gone."""
    pairs = [(getattr(now, name), getattr(before, name)) for name in CURRENCIES]
    return any(old is not None and (new is None or new > old) for new, old in pairs)


def _has_room(plan: SpendingPlan, spent: Spent) -> bool:
    """Return whether a step and another final measurement can be paid."""
    limits, needed = plan.limits, plan.fewest - plan.seed  # the first prompt is measured already
    if limits.rollouts is not None and limits.rollouts - spent.rollouts < needed:
        return False
    pairs = [(getattr(limits, name), getattr(spent, name)) for name in ("calls", "tokens", "money")]
    return all(limit is None or limit > paid for limit, paid in pairs)
