"""Estimates the KL divergence between two policies from tokens that one of them sampled."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from agl_objectives.losses import LIMIT

__all__ = ["KL", "kl_estimate"]

KL = Literal["k1", "k2", "k3"]
"""The estimates of a KL divergence."""


def kl_estimate(logp_M: Tensor, reference_logp_M: Tensor, *, kind: KL) -> Tensor:
    """Return per-token estimates of KL(policy || reference) from samples of the policy, [M], in nats.

    Schulman 2020, "Approximating KL divergence", with d = reference - policy log-probability:

        k1   -d              unbiased; as a loss it has zero gradient in expectation, so use it only as a metric
        k2   d^2 / 2         its expected gradient is that of the KL divergence
        k3   exp(d) - d - 1  unbiased and never negative; GRPO's (arXiv 2402.03300, equation 4)

    Beyond d = 20 exp(d) is replaced by its tangent, because it would overflow.
    """
    d_M = reference_logp_M - logp_M  # [M], log of the paper's r = reference / policy
    if kind == "k1":
        return -d_M  # grad is grad log pi, whose expectation under pi is 0
    if kind == "k2":
        return 0.5 * d_M**2  # grad is -d grad log pi = log(pi / ref) grad log pi, the KL's own score gradient
    near_M = d_M.clamp(max=LIMIT)
    exp_M = torch.exp(near_M) * (1.0 + (d_M - near_M))  # exp(d), its tangent beyond the limit
    return exp_M - d_M - 1.0  # E_pi[exp(d)] = 1, so this is k1 plus a control variate of mean 0
