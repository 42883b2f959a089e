"""Weighs trained tokens so that a rollout's share does not depend on how many rows it has.

A loss is the sum of `weight_M * loss_M` divided by a total. Weights and total belong to the whole update, so the losses
of its micro-batches add up to the update's:

    token      1 / tokens of the update                   every token counts the same (DAPO, arXiv 2503.14476, eq. 8)
    sequence   (1 / tokens of the rollout) / rollouts     every rollout counts the same (GRPO, arXiv 2402.03300, eq. 3)
    constant   (1 / constant) / rollouts                  no length bias (Dr. GRPO, arXiv 2503.20783, section 3.1)
"""

from __future__ import annotations

from typing import Literal, get_args

from agl.errors import ConfigError

__all__ = ["AGGREGATIONS", "MEANS", "Aggregation", "MeanAggregation", "token_weight", "update_total"]

Aggregation = Literal["token", "sequence", "constant"]
"""The ways of weighing tokens."""

AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)

MeanAggregation = Literal["token", "sequence"]
"""The ways that are means, for algorithms without a constant to divide by."""

MEANS: tuple[str, ...] = get_args(MeanAggregation)


def token_weight(aggregation: Aggregation, *, rollout_tokens: int, constant: int = 1) -> float:
    """Return the weight of one trained token of a rollout that has `rollout_tokens` of them over all its rows."""
    if aggregation == "token":
        return 1.0
    if aggregation == "sequence":
        return 1.0 / rollout_tokens  # over all rows of the rollout: splitting it into rows changes nothing
    if aggregation == "constant":
        return 1.0 / constant  # the same for a token of a short and of a long answer
    raise ConfigError(f"The aggregation {aggregation!r} is unknown. Use one of: {', '.join(AGGREGATIONS)}.")


def update_total(aggregation: Aggregation, *, tokens: int, rollouts: int) -> float:
    """Return the divisor of weighted sums; both counts are the whole update's, silent rollouts included."""
    # Rollouts with advantage 0 add nothing to the sum but stay here, so leaving them out of the forward pass saves
    # time and does not make the gradient of the others larger.
    return float(tokens if aggregation == "token" else rollouts)
