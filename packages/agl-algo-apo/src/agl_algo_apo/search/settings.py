"""The settings that the optimisers share, and the spending plan that follows from them.

The plan counts rollouts. With V validation tasks, B training tasks of a step (``gradient_batch_size``), F tasks in the
first slice of a race (``val_batch_size``) and K children of a step (``branch_factor``):

    first measurement   V
    one proposal        (2 * B + (F + V) / 2) / K    the parent's batch and the gate, and half of a race on average
    final measurement   from 3 * min(8, V) to 3 * V  the best, the runner-up and the first prompt, once per task
    validation          at the end, by the trainer; that at its start is part of the first measurement
"""

from collections.abc import Mapping
from typing import Literal

from agl.errors import ConfigError
from agl.schemas import Record
from agl_algo_apo.proposals.optimizer import OptimizerSettings
from agl_algo_apo.search.budget import BudgetLimits, Prices

Selector = Literal["mixed", "best", "pareto", "beam", "ucb"]
Publish = Literal["improvement", "end"]
Preset = Literal["light", "medium", "heavy"]
PROPOSALS: Mapping[str, int] = {"light": 10, "medium": 25, "heavy": 60}
"""Number of proposals that each preset pays for."""

FEWEST_PROPOSALS = 3
"""A budget that does not reach for so many proposals is refused."""

FEWEST_FINAL = 8
"""Fewest fresh rollouts of each candidate in the final measurement, where there are so many validation tasks."""


_COUNTS = ("beam_rounds", "delete_every", "max_chars", "demonstrations", "demonstration_chars")


class SearchSettings(Record, frozen=True, kw_only=True):
    """Parameters of a search; `apo.py` describes them where a person sets them."""

    optimizer: str | OptimizerSettings
    critic: str | OptimizerSettings | None = None
    budget: int | Preset | BudgetLimits = "light"
    prices: Prices = Prices()
    beam_width: int = 4
    branch_factor: int = 3
    beam_rounds: int = 0
    gradient_batch_size: int = 8
    val_batch_size: int = 8
    selector: Selector = "mixed"
    p_best: float = 0.5
    patience: int = 10
    delete_every: int = 6
    demonstrations: int = 0
    demonstration_chars: int = 4000
    perfect_score: float = 1.0
    failure_reward: float = 0.0
    reserve: float = 0.1
    test: float = 0.25
    publish: Publish = "improvement"
    invariants: dict[str, tuple[str, ...]] = {}
    filled: tuple[str, ...] = ()
    max_chars: int = 0
    roles: dict[str, str] = {}
    requests: dict[str, str] = {}

    def check(self, algorithm: str) -> None:
        """Check that numbers are in their ranges; raises :class:`ConfigError`."""
        names = ("beam_width", "branch_factor", "gradient_batch_size", "val_batch_size", "patience")
        low = {name: getattr(self, name) for name in names if getattr(self, name) < 1}
        if low:
            raise ConfigError(f"{algorithm} got {low}; each must be at least 1")
        negative = {name: getattr(self, name) for name in _COUNTS}
        if min(negative.values()) < 0:
            raise ConfigError(f"{algorithm} got {negative}; each must be at least 0")
        prices = {name: getattr(self.prices, name) for name in ("input", "output", "rollout")}
        if min(prices.values()) < 0:
            raise ConfigError(f"{algorithm} got prices = {prices}; each must be at least 0")
        if not self.failure_reward < self.perfect_score:
            raise ConfigError(
                f"{algorithm} got failure_reward={self.failure_reward:g} and perfect_score={self.perfect_score:g}; the "
                "first must be below the second"
            )
        for optimizer in (self.optimizer, self.critic):
            if isinstance(optimizer, OptimizerSettings):
                optimizer.check(algorithm)
        if not (0.0 <= self.reserve < 1.0 and 0.0 <= self.p_best <= 1.0 and 0.0 <= self.test < 1.0):
            raise ConfigError(
                f"{algorithm} got reserve={self.reserve}, p_best={self.p_best}, test={self.test}; all are shares of 1"
            )

    def test_tasks(self, val: int) -> int:
        """Return how many of the validation tasks take no part in the search: none where they would be too few."""
        count = int(self.test * val)
        return count if count >= FEWEST_FINAL else 0


class SpendingPlan(Record, frozen=True, kw_only=True):
    """The rollouts and questions that a search may spend, and on what.

    Attributes:
        limits: The ceilings.
        seed: Rollouts of the first measurement.
        proposal: Rollouts that one proposal takes on average until it is decided.
        final: Rollouts held back for the final measurement.
        after: Rollouts of the trainer's validation at the end.
        fewest: Rollouts that the method needs at least.
        calls: Questions to the optimiser's model that one proposal takes.
    """

    limits: BudgetLimits
    seed: int
    proposal: float
    final: int
    after: int
    fewest: int
    calls: int

    @property
    def words(self) -> str:
        """The plan in one line."""
        limits = self.limits
        parts = [f"{getattr(limits, name):g} {name}" for name in ("rollouts", "calls", "tokens", "money")
                 if getattr(limits, name) is not None]  # fmt: skip
        line = f"plan: at most {', '.join(parts)}"
        if limits.rollouts is None:
            return line
        search = limits.rollouts - self.seed - self.final - self.after  # left for proposals
        words = (
            f"{line}; rollouts: {self.seed} on the first prompt, {search} on about "
            f"{int(search / self.proposal)} proposals, {self.final} on the final measurement"
        )
        return f"{words}, {self.after} on the validation at the end" if self.after else words


def spending_plan(
    settings: SearchSettings, *, tasks: int, val: int, after: int, calls: int, algorithm: str
) -> SpendingPlan:
    """Return the spending plan; raises :class:`ConfigError` when the budget is less than the method needs.

    Args:
        settings: The settings, with the budget.
        tasks: Number of training tasks; ``val`` of validation tasks.
        after: Number of the tasks of the trainer's validation at the end.
        calls: Questions to the optimiser's model per proposal.
        algorithm: The algorithm's name, for the error.
    """
    batch = min(settings.gradient_batch_size, tasks)  # B
    first = min(settings.val_batch_size, val)  # F
    # Once B for the parent and once for its children together, which share the failures; a race ends between its
    # first slice F and all of V. A step makes K children, and all of it is paid once per step.
    proposal = (2 * batch + (first + val) / 2) / settings.branch_factor
    fewest_final = 3 * min(FEWEST_FINAL, val)  # three finalists
    budget = settings.budget
    if isinstance(budget, str):
        rollouts = val + round(PROPOSALS[budget] * proposal) + 3 * val + after
        # Twice the questions that the proposals take: answers without a usable text cost one as well.
        budget = BudgetLimits(rollouts=rollouts, calls=2 * calls * PROPOSALS[budget])
    limits = BudgetLimits(rollouts=budget) if isinstance(budget, int) else budget
    if limits == BudgetLimits():
        raise ConfigError(
            f'{algorithm} has no budget; set budget = 400 (rollouts), a preset such as "light", or limits'
        )
    final = min(3 * val, max(fewest_final, int((limits.rollouts or 0) * settings.reserve)))
    needed = val + final + after + 2 * batch + first  # one whole step, which makes the fewest proposals
    if limits.rollouts is not None and limits.rollouts < needed:
        raise ConfigError(
            f"{algorithm} has a budget of {limits.rollouts} rollouts and needs at least {needed}: {val} to measure the "
            f"first prompt on all validation tasks, {2 * batch + first} for {FEWEST_PROPOSALS} proposals, {final} for "
            f"the final measurement, {after} for the validation at the end. Raise the budget, or give fewer "
            "validation tasks"
        )
    if limits.calls is not None and limits.calls < calls * FEWEST_PROPOSALS:
        raise ConfigError(
            f"{algorithm} has a budget of {limits.calls} calls of the optimiser's model and needs at least "
            f"{calls * FEWEST_PROPOSALS}: {calls} for each of {FEWEST_PROPOSALS} proposals. Raise the budget"
        )
    return SpendingPlan(
        limits=limits, seed=val, proposal=proposal, final=final, after=after, fewest=needed, calls=calls
    )


def check_question(plan: SpendingPlan, prices: Prices, *, max_input: int, max_output: int, algorithm: str) -> None:
    """Check that the budget has room for one question to the optimiser's model; raises :class:`ConfigError`.

    Args:
        plan: The limits, and the rollouts that have to be paid beside the question.
        prices: Prices for a budget in money.
        max_input: The most tokens that the shortest question can have.
        max_output: The most tokens that its answer can have.
        algorithm: The algorithm's name, for the error.
    """
    limits, tokens = plan.limits, max_input + max_output
    sizes = f"up to {max_input} tokens of the request and {max_output} of the answer"
    if limits.tokens is not None and limits.tokens < tokens:
        raise ConfigError(
            f"{algorithm} has a budget of {limits.tokens} tokens, and one question to the optimiser's model takes "
            f"{sizes}. Raise the budget, or lower optimizer.max_tokens"
        )
    cost = plan.fewest * prices.rollout + (max_input * prices.input + max_output * prices.output) / 1e6  # per million
    if limits.money is not None and limits.money < cost:
        raise ConfigError(
            f"{algorithm} has a budget of {limits.money:g} in money and needs at least {cost:.6g}, for {plan.fewest} "
            f"rollouts and one question to the optimiser's model ({sizes}). Raise the budget, give fewer validation "
            "tasks, or lower optimizer.max_tokens"
        )
