"""Generalised advantage estimation over the policy's tokens, as pure functions that can be checked by hand.

Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation"
(arXiv 1506.02438), equation 16, here as the recursion that equations 11 and 12 of PPO (arXiv 1707.06347) unroll:

    delta_t = r_t + gamma V_{t+1} - V_t
    A_t     = delta_t + gamma lambda A_{t+1}
    R_t     = A_t + V_t                            the target of the value function

lambda = 0 gives A_t = delta_t: little variance, and the bias of V. lambda = 1 gives the discounted sum of rewards
less V_t: no bias, and all the variance.

A row of the call forest is one trajectory. Its steps are the tokens that the policy wrote; the tokens that it read
between them are no steps, so they cost no discount.
Credit assignment gives returns per call, G_k, and GAE needs rewards. They are r = G_k - G_{k+1} at the last token of
call k, and r = G_n at the last token of the row's last call. With gamma = 1 the rewards after any token of call k
then sum to G_k, whichever credit was configured.
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
    """Return the reward at each token of a row, [T] float64; `returns` are by span id, calls without one earn nothing.

    A row without a call that has a return earns 0 everywhere.
    """
    rewards_T = torch.zeros(len(row.mask), dtype=torch.float64)
    parts = sorted((part for part in row.segments if part.span_id in returns), key=lambda part: part.start)
    for index, part in enumerate(parts):
        # r = G_k - G_{k+1}; the sum over the calls from k on telescopes to G_k. After the last call G is 0.
        later = returns[parts[index + 1].span_id] if index + 1 < len(parts) else 0.0
        rewards_T[part.stop - 1] += returns[part.span_id] - later  # `stop` is exclusive
    return rewards_T


def advantages(rewards_N: Tensor, values_N: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return the advantage of every step of one trajectory and the target of its value, both [N].

    The trajectory ends after step N: nothing follows, and nothing is bootstrapped.
    """
    backwards: list[float] = []
    # A_{N+1} = V_{N+1} = 0: an episode ends by itself here, it is never cut off at a horizon.
    following, next_value = 0.0, 0.0
    for reward, value in zip(reversed(numbers(rewards_N)), reversed(numbers(values_N)), strict=True):
        # A_t = (r_t + gamma V_{t+1} - V_t) + gamma lambda A_{t+1}
        following = reward + gamma * next_value - value + gamma * lam * following
        next_value = value
        backwards.append(following)
    advantages_N = torch.tensor(backwards[::-1], dtype=values_N.dtype)  # [N], in the order of the steps again
    return advantages_N, advantages_N + values_N  # R_t = A_t + V_t, the lambda-return
