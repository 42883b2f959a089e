"""The contract of losses and estimators: the arguments that they get, and the results that they return.

A loss and an estimator are pure functions of tensors. They know no model, tokenizer or episode, divide by no number of
rows, and have no state, so that one implementation works in every training engine.

Notation: M is the number of trained tokens of a micro-batch, which are flat and in any order. S is the number of
scores: a rollout has one score in every baseline group in which it has calls. Floats may have any dtype; tests use
float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

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
    """The trained tokens of a micro-batch, [M] each. Only `logp_M` requires a gradient.

    A row is the input of a forward pass. A rollout may have several rows, and their number depends on details of its
    conversation, so a loss must not depend on `row_M`, nor on the order of the tokens.
    """

    logp_M: Tensor  # log pi(y_t), nats, of the policy in training
    old_M: Tensor  # log pi_old(y_t), the same policy before the step's first update
    behaviour_M: Tensor  # log pi_behaviour(y_t) as the server recorded it
    advantages_M: Tensor  # A_t
    weight_M: Tensor  # w_t of the aggregation, at least 0; a token of weight 0 must have no effect
    row_M: Tensor  # int64, the row of each token
    rollout_M: Tensor  # int64, the rollout of each token
    entropy_M: Tensor | None = None  # H_t in nats, without gradient; None in a survey and for losses of this package
    extras: Mapping[str, Tensor] = field(default_factory=lambda: dict[str, "Tensor"]())  # [M] each, see `SurveyedLoss`


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """The loss of every token, [M], and numbers to log.

    The training engine multiplies `loss_M` by importance weights and `weight_M`, adds the products up, and divides by
    the update's total. `counts` are sums over tokens, such as the number of clipped tokens; they are logged per token.
    """

    loss_M: Tensor
    counts: Mapping[str, float] = field(default_factory=dict[str, float])


class Loss(Protocol):
    """Computes the loss of trained tokens."""

    def __call__(self, tokens: TokenBatch) -> LossTerms:
        """Return the loss of every token, which must not depend on how an update is cut into micro-batches."""
        ...


@runtime_checkable
class SurveyedLoss(Loss, Protocol):
    """A loss in which a token depends on other tokens of its rollout or of the whole update.

    A micro-batch has only a part of an update, and may have a part of a rollout. Before the first micro-batch the
    training engine therefore calls `survey` with all tokens of the update, silent ones included, without gradient and
    without entropies. Each micro-batch then has its part of the result in `TokenBatch.extras`. This may cost one more
    forward pass.
    """

    def survey(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        """Return values for the tokens of a whole update: tensors by name, [M] each, in the order of the tokens."""
        ...


def surveyed(loss: Loss, tokens: TokenBatch) -> TokenBatch:
    """Return the tokens of a whole update with the loss's survey in `extras`; unchanged for a loss without a survey."""
    if not isinstance(loss, SurveyedLoss):
        return tokens
    found = loss.survey(replace(tokens, logp_M=tokens.logp_M.detach(), entropy_M=None))
    return replace(tokens, extras={**tokens.extras, **found})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The scores of rollouts, [S] each. In a baseline group a rollout has one score, whatever its number of calls."""

    scores_S: Tensor  # the mean credit of the rollout's calls in this group
    group_S: Tensor  # int64, 0 to number of groups - 1
    tokens_S: Tensor  # trained tokens of those calls
    baseline_S: Tensor | None = None  # the score of a greedy rollout of the same task; None without greedy rollouts
    roles_S: tuple[str, ...] = ()  # the role of the calls (`CallCredit.role`), S names; empty if the credit has none


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """The advantage `found_S` of every score, and the factor `unit_S` for a call's distance from the score, [S] each.

    A call with the credit v in a rollout with the score s gets the advantage `found + (v - s) * unit`.
    """

    found_S: Tensor
    unit_S: Tensor


class Estimator(Protocol):
    """Turns scores into advantages."""

    def __call__(self, scores: Scores) -> Estimates:
        """Return one estimate for each score, in the order and the dtype of the scores."""
        ...
