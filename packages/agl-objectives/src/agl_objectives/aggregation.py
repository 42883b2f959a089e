"""Weighs trained tokens and splits rows into updates, so that the number of rows of a rollout makes no difference.

A loss is the sum of `weight_M * loss_M` divided by a total. Weights and total belong to the whole update, so the losses
of its micro-batches add up to the loss of the update. A token has the weight in parentheses, or 1:

    token      1 / tokens of the update                   every token counts the same (DAPO, arXiv 2503.14476, eq. 8)
    sequence   (1 / tokens of the rollout) / rollouts     every rollout counts the same (GRPO, arXiv 2402.03300, eq. 3)
    constant   (1 / constant) / rollouts                  no length bias (Dr. GRPO, arXiv 2503.20783, section 3.1)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Aggregation",
    "MeanAggregation",
    "WeighedRow",
    "loss_weights",
    "split_updates",
    "token_weight",
    "update_total",
]

Aggregation = Literal["token", "sequence", "constant"]
"""The ways of weighing trained tokens in a loss; see the module's docstring."""

MeanAggregation = Literal["token", "sequence"]
"""The aggregations that give a mean, without a constant divisor."""


def token_weight(aggregation: Aggregation, *, rollout_tokens: int, constant: int = 1) -> float:
    """Return the weight of one trained token of a rollout with `rollout_tokens` trained tokens in all its rows."""
    if aggregation == "token":
        return 1.0
    if aggregation == "sequence":
        return 1.0 / rollout_tokens  # over all rows of the rollout: splitting it into rows changes nothing
    return 1.0 / constant  # the same for a token of a short and of a long answer


def update_total(aggregation: Aggregation, *, tokens: int, rollouts: int) -> float:
    """Return the number by which the weighted sum of an update's losses is divided.

    Both counts are of the whole update, including silent rollouts.
    """
    # Silent rollouts add nothing to the sum but count in the divisor. Leaving them out of the forward pass therefore
    # saves time without making the gradient of the others larger.
    return float(tokens if aggregation == "token" else rollouts)


class WeighedRow(Protocol):
    """The attributes of a row that determine its weight."""

    @property
    def rollout(self) -> str:
        """Id of the row's rollout."""
        ...

    @property
    def trained_tokens(self) -> int:
        """Number of tokens that are trained."""
        ...


R = TypeVar("R", bound=WeighedRow)


def split_updates(rows: Sequence[R], *, updates: int) -> list[list[R]]:
    """Split rows into at most `updates` lists with nearly equal numbers of rollouts, in order.

    All rows of a rollout are in one list. No list is empty.
    """
    order = list(dict.fromkeys(row.rollout for row in rows))  # each rollout once, in order of appearance
    count = max(1, min(updates, len(order)))  # fewer rollouts than updates: one rollout each
    place = {rollout: index * count // len(order) for index, rollout in enumerate(order)}  # 0 to count - 1
    lists: list[list[R]] = [[] for _ in range(count)]
    for row in rows:
        lists[place[row.rollout]].append(row)
    return [part for part in lists if part]


def loss_weights(
    rows: Sequence[WeighedRow], *, aggregation: Aggregation, constant: int = 1
) -> tuple[list[float], float]:
    """Return the weight of a trained token of each row, and the divisor of an update that consists of all `rows`."""
    # The tokens of a rollout are counted over all its rows, so its number of rows does not change the weights.
    tokens: dict[str, int] = {}
    for row in rows:
        tokens[row.rollout] = tokens.get(row.rollout, 0) + row.trained_tokens
    found = [token_weight(aggregation, rollout_tokens=max(1, tokens[row.rollout]), constant=constant) for row in rows]
    # An update without a trained token divides by 1: its sum is 0, and 0 / 0 would spread NaN.
    return found, update_total(aggregation, tokens=max(1, sum(tokens.values())), rollouts=max(1, len(tokens)))
