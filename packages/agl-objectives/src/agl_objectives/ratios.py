"""The ratio of the policy to the old policy, and the mean of numbers over the tokens of each rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from agl_objectives.typed_torch import unique

if TYPE_CHECKING:
    from torch import Tensor

    from agl_objectives.contract import TokenBatch

LIMIT = 20.0
"""Largest size of a log-ratio, as in VERL. Beyond it exp would overflow, and 0 times infinity spread NaN."""


def log_ratio(tokens: TokenBatch) -> Tensor:
    """Return log pi(y_t) - log pi_old(y_t), [M], within +-20; its gradient is 0 beyond."""
    return (tokens.logp_M - tokens.old_M).clamp(-LIMIT, LIMIT)


def ratio(tokens: TokenBatch) -> Tensor:
    """Return r_t = pi(y_t) / pi_old(y_t), [M].

    In the first update after pi_old was computed r is 1, and the gradient of A r is A grad log pi: REINFORCE.
    """
    return torch.exp(log_ratio(tokens))


def rollout_mean(values_M: Tensor, tokens: TokenBatch) -> Tensor:
    """Return for every token the mean over the tokens of its rollout, over all its rows, [M]."""
    _, place_M = unique(tokens.rollout_M)  # [M], 0 to number of rollouts - 1
    counted_M = (tokens.weight_M > 0).to(values_M.dtype)  # what has no weight must have no effect
    size = int(place_M.max()) + 1 if len(place_M) else 0
    zeros = values_M.new_zeros(size)
    total = zeros.index_add(0, place_M, values_M * counted_M)
    count = zeros.index_add(0, place_M, counted_M).clamp(min=1.0)
    return (total / count)[place_M]
