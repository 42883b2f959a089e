"""The settings that the optimisers share, and the spending plan derived from them.

The plan counts rollouts. With V validation tasks, B training tasks of a step (``gradient_batch_size``), F tasks in the
first slice of a race (``val_batch_size``) and K children of a step (``branch_factor``):

    first measurement   V
    one proposal        (2 * B + (F + V) / 2) / K    the parent's batch and the trial, and half of a race on average
    final measurement   from 2 * min(8, V) to 2 * V  the winner and the first prompt, once per task
    validation          at the end, by the trainer; its validation at the start is part of the first measurement
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from agl.errors import ConfigError
from agl.schemas import Record
from agl_algo_apo.proposals.optimizer import OptimizerSettings
from agl_algo_apo.search.budget import CURRENCIES, BudgetLimits, Settings

Selector = Literal["mixed", "beam"]
Publish = Literal["improvement", "end"]
Preset = Literal["light", "medium", "heavy"]
PROPOSALS: Mapping[str, int] = {"light": 10, "medium": 25, "heavy": 60}
"""Number of proposals that each budget preset pays for."""

FEWEST_PROPOSALS = 3
"""A budget that does not cover this many proposals is refused."""

FEWEST_FINAL = 8
"""The fewest fresh rollouts per candidate in the final measurement, if there are that many validation tasks."""

Count = Annotated[int, Meta(ge=1)]
Whole = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Part = Annotated[float, Meta(ge=0, lt=1)]
Error = Annotated[float, Meta(gt=0, le=1)]


class Parents(Settings, frozen=True, kw_only=True):
    """The choice of parents (`proposals/parents.py`).

    Attributes:
        selector: ``mixed`` or ``beam``.
        p_best: Probability with which ``mixed`` takes the best candidate, and not one that leads on some tasks.
        beam_width: Number of candidates among which ``beam`` takes turns.
    """

    selector: Selector = "mixed"
    p_best: Share = 0.5
    beam_width: Count = 4


class Examples(Settings, frozen=True, kw_only=True):
    """Recorded good runs of training tasks that a prompt shows as examples.

    Attributes:
        most: The most examples in one prompt; 0 for none.
        max_chars: The most characters of all examples together; longer runs are left out, never cut.
    """

    most: Whole = 0
    max_chars: Whole = 4000


class Scoring(Settings, frozen=True, kw_only=True):
    """The scale of rewards, the error of the search, and the rollouts of the final measurement.

    Attributes:
        perfect: The best reward that a task can get; a rollout that gets more ends the run with an error.
        failure: The reward of a rollout in which the agent failed or ran out of time; below ``perfect``.
        reserve: Share of the rollouts that is held back for the final measurement.
        test: Share of the validation tasks that take no part in the search and give the reported score; no tasks if
            the share would be fewer than 8.
        error: The largest probability that the search publishes a text that is not better than the first one; 1 to
            publish the best text of the races without a proof, for example because another gate judges it.
    """

    perfect: float = 1.0
    failure: float = 0.0
    reserve: Part = 0.1
    test: Part = 0.25
    error: Error = 0.2

    def __post_init__(self) -> None:
        if not self.failure < self.perfect:
            raise ValueError(f"scoring.failure is {self.failure:g} and must be below scoring.perfect, {self.perfect:g}")

    def test_tasks(self, val: int) -> int:
        """Return how many of ``val`` validation tasks become test tasks; 0 if they would be too few."""
        count = int(self.test * val)
        return count if count >= FEWEST_FINAL else 0


class Texts(Settings, frozen=True, kw_only=True):
    """The rules that every proposed text must follow, and its readers.

    Attributes:
        invariants: Texts that must stay in a resource, by resource.
        filled: Placeholders that the agent fills with something other than a key of the task.
        max_chars: Longest text in characters; 0 for four times the first one's length, and at least 4000.
        roles: Regular expression for the names of the agents that read a resource, by resource; by default, the calls
            whose messages contain its text count as its readers.
    """

    invariants: dict[str, tuple[str, ...]] = {}
    filled: tuple[str, ...] = ()
    max_chars: Whole = 0
    roles: dict[str, str] = {}


PARENTS, EXAMPLES, SCORING, TEXTS = Parents(), Examples(), Scoring(), Texts()


class SearchSettings(Settings, frozen=True, kw_only=True):
    """Parameters of a search; `apo.py` describes those that users set."""

    optimizer: str | OptimizerSettings
    critic: str | OptimizerSettings | None = None
    budget: int | Preset | BudgetLimits = "light"
    branch_factor: Count = 3
    beam_rounds: Whole = 0
    gradient_batch_size: Count = 8
    val_batch_size: Count = 8
    parents: Parents = PARENTS
    patience: Count = 10
    demonstrations: Examples = EXAMPLES
    scoring: Scoring = SCORING
    publish: Publish = "improvement"
    texts: Texts = TEXTS
    requests: dict[str, str] = {}

    @classmethod
    def checked(cls, algorithm: str, **values: Any) -> "SearchSettings":
        """Return settings with these values; raises :class:`ConfigError` if a number is out of its range."""
        try:
            return msgspec.convert(msgspec.to_builtins(cls(**values)), cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{algorithm} got a wrong parameter: {error}") from error


class SpendingPlan(Record, frozen=True, kw_only=True):
    """The rollouts and requests that a search may spend, by purpose.

    Attributes:
        limits: The ceilings.
        seed: Rollouts of the first measurement.
        proposal: Rollouts that one proposal takes on average until it is decided.
        final: Rollouts held back for the final measurement.
        after: Rollouts of the trainer's validation at the end.
        fewest: The fewest rollouts that the method needs.
        calls: Requests to the optimiser's model that one proposal takes.
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
        """The plan in one line, for users."""
        limits = self.limits
        parts = [f"{getattr(limits, name):g} {name}" for name in CURRENCIES if getattr(limits, name) is not None]
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
    """Return the spending plan; raises :class:`ConfigError` if the budget is less than the method needs.

    Args:
        settings: The settings, with the budget.
        tasks: Number of training tasks.
        val: Number of validation tasks.
        after: Number of tasks in the trainer's validation at the end.
        calls: Requests to the optimiser's model per proposal.
        algorithm: The algorithm's name, for the error.
    """
    batch = min(settings.gradient_batch_size, tasks)  # B
    first = min(settings.val_batch_size, val)  # F
    # Once B for the parent and once for its children together, which share the failures; a race ends between its first
    # slice F and all of V. A step makes K children, and all of this is paid for once per step.
    proposal = (2 * batch + (first + val) / 2) / settings.branch_factor
    fewest_final = 2 * min(FEWEST_FINAL, val)  # two finalists
    budget = settings.budget
    if isinstance(budget, str):
        rollouts = val + round(PROPOSALS[budget] * proposal) + 2 * val + after
        # Twice as many requests as the proposals take: answers without a usable text cost one as well.
        budget = BudgetLimits(rollouts=rollouts, calls=2 * calls * PROPOSALS[budget])
    limits = BudgetLimits(rollouts=budget) if isinstance(budget, int) else budget
    if all(getattr(limits, name) is None for name in CURRENCIES):
        raise ConfigError(
            f'{algorithm} has no budget; set budget = 400 (rollouts), a preset such as "light", or limits'
        )
    final = min(2 * val, max(fewest_final, int((limits.rollouts or 0) * settings.scoring.reserve)))
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


def check_question(plan: SpendingPlan, *, max_input: int, max_output: int, algorithm: str) -> None:
    """Raise :class:`ConfigError` if the budget has no room for one request to the optimiser's model.

    Args:
        plan: The limits, and the rollouts that have to be paid for in addition to the request.
        max_input: The most tokens that the shortest request can have.
        max_output: The most tokens that the answer can have.
        algorithm: The algorithm's name, for the error.
    """
    limits, prices, tokens = plan.limits, plan.limits.prices, max_input + max_output
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
