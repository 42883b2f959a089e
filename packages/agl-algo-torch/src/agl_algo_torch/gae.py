"""Generalised advantage estimation over the policy's tokens, as pure functions that can be checked by hand.

Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation"
(arXiv 1506.02438), equations 11 and 12: with delta_t = r_t + gamma V_{t+1} - V_t,
A_t = delta_t + gamma lambda A_{t+1}; the value's target is A_t + V_t.

A row of the call forest is one trajectory. Its steps are the tokens that the policy wrote; what it read between them
is no step. Credit assignment gives returns per call, G_k; as rewards these are r = G_k - G_{k+1} at the last token of
call k and r = G_n at that of the row's last call, so that with gamma = 1 the rewards that follow a token of call k sum
to G_k, whichever credit was configured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from agl_algo_torch.typed_torch import numbers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from agl.schemas import Row


def call_rewards(row: Row, returns: Mapping[str, float]) -> Tensor:
    """Return the reward at each token of a row, [T]; `returns` are by span id, and calls without one earn nothing."""
    rewards_T = torch.zeros(len(row.mask), dtype=torch.float64)
    parts = sorted((part for part in row.segments if part.span_id in returns), key=lambda part: part.start)
    for index, part in enumerate(parts):
        later = returns[parts[index + 1].span_id] if index + 1 < len(parts) else 0.0
        rewards_T[part.stop - 1] += returns[part.span_id] - later
    return rewards_T


def advantages(rewards_N: Tensor, values_N: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return the advantage of every step of one trajectory and the target of its value, both [N]; it ends after N."""
    backwards: list[float] = []
    following, next_value = 0.0, 0.0
    for reward, value in zip(reversed(numbers(rewards_N)), reversed(numbers(values_N)), strict=True):
        following = reward + gamma * next_value - value + gamma * lam * following
        next_value = value
        backwards.append(following)
    advantages_N = torch.tensor(backwards[::-1], dtype=values_N.dtype)
    return advantages_N, advantages_N + values_N
