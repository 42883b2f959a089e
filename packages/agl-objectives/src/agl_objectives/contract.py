"""The contract of losses and estimators: what they are given and what they return.

A loss and an estimator are pure functions of tensors. They see no model, no tokenizer and no episode, divide by no
number of rows, and keep no state, so that one implementation serves every engine.

Notation: M is the number of trained tokens of a micro-batch, flat and in any order; S is the number of scores, one for
every rollout and baseline group that it has calls in. Floats may have any dtype; tests use float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "Estimates",
    "Estimator",
    "Loss",
    "LossTerms",
    "Scores",
    "SurveyedLoss",
    "TokenBatch",
    "surveyed",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """The trained tokens of a micro-batch, [M] each. `logp_M` requires grad; everything else is data.

    Rows are what one forward pass reads and rollouts what the agent did. A rollout may have several rows, and how many
    is an accident of its conversation, so no loss may depend on `row_M` or on the order of tokens.
    """

    logp_M: Tensor  # log pi(y_t), nats, of the policy in training
    old_M: Tensor  # log pi_old(y_t), the same policy before the step's first update
    behaviour_M: Tensor  # log pi_behaviour(y_t) as the server recorded it
    advantages_M: Tensor  # A_t
    weight_M: Tensor  # w_t of the aggregation, at least 0; a token of weight 0 must have no effect
    row_M: Tensor  # int64, the row of each token
    rollout_M: Tensor  # int64, the rollout of each token
    entropy_M: Tensor | None = None  # H_t in nats, without gradient; none in a survey, and for losses of agl itself
    extras: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])  # [M] each, see `SurveyedLoss`


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """The loss of every token, [M], and numbers to log.

    The engine multiplies `loss_M` with importance weights and `weight_M`, adds up and divides by the update's total.
    `counts` are sums over tokens, such as how many were clipped; the engine logs them per token.
    """

    loss_M: Tensor
    counts: Mapping[str, float] = field(default_factory=dict[str, float])


class Loss(Protocol):
    """A loss of trained tokens."""

    def __call__(self, tokens: TokenBatch) -> LossTerms:
        """Return the loss of every token; the losses of an update's micro-batches add up to the update's."""
        ...


@runtime_checkable
class SurveyedLoss(Loss, Protocol):
    """A loss whose tokens depend on others: those of their rollout, or those of the whole update.

    Micro-batches may cut rollouts and always cut updates. Before the first of them the engine shows the loss all
    tokens of the update, silent ones included, without gradient and without entropies. What the loss makes of them
    comes back with each micro-batch in `TokenBatch.extras`. This costs one more forward pass.
    """

    def survey(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        """Return tensors by name, [M] each, in the order of the tokens."""
        ...


def surveyed(loss: Loss, tokens: TokenBatch) -> TokenBatch:
    """Return the tokens of a whole update with what the loss finds in a survey of them; unchanged where it has none."""
    if not isinstance(loss, SurveyedLoss):
        return tokens
    found = loss.survey(replace(tokens, logp_M=tokens.logp_M.detach(), entropy_M=None))
    return replace(tokens, extras={**tokens.extras, **found})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The scores of rollouts, [S] each: a rollout counts once, however often its agent calls the model."""

    scores_S: Tensor  # the mean of what credit gave the rollout's calls in this group
    group_S: Tensor  # int64, 0 to number of groups - 1
    tokens_S: Tensor  # trained tokens behind the score
    baseline_S: Tensor | None = None  # the reward of a greedy rollout of the same task, where one was made


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """The advantage of every score and the unit of distances from it, [S] each.

    A call whose credit is v in a rollout of score s gets `found + (v - s) * unit`.
    """

    found_S: Tensor
    unit_S: Tensor


class Estimator(Protocol):
    """Turns scores into advantages."""

    def __call__(self, scores: Scores) -> Estimates:
        """Return the estimates in the order of the scores, in their dtype."""
        ...
