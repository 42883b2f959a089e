"""Divergences between the distributions of a policy and of a teacher, per token.

M is the number of tokens, V the vocabulary, K the number of tokens that a comparison tells apart.
p is the policy's distribution and q the teacher's; both are given as log-probabilities in nats.

    reverse  KL(p || q)                        keeps to what the teacher finds likely
    forward  KL(q || p)                        covers everything that the teacher finds likely
    jsd      KL(p || m) / 2 + KL(q || m) / 2   with m = (p + q) / 2; never above log 2
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from torch import Tensor

Divergence = Literal["jsd", "reverse", "forward"]
DIVERGENCES = ("jsd", "reverse", "forward")

_LEAST = 1e-9
"""Smallest probability of all tokens outside of the first K together; its logarithm must stay finite."""


def scaled_logprobs(logits_M_V: Tensor, *, temperature_M: Tensor) -> Tensor:
    """Return the logarithm of `softmax(logits / temperature)`, [M, V], at least float32."""
    wide_M_V = logits_M_V.to(torch.promote_types(logits_M_V.dtype, torch.float32))
    return (wide_M_V / temperature_M[:, None]).log_softmax(dim=1)


def likeliest(logp_M_V: Tensor, *, count: int) -> Tensor | None:
    """Return the ids of the `count` likeliest tokens, [M, K]; None for the whole vocabulary."""
    if not 0 < count < logp_M_V.shape[1]:
        return None
    return logp_M_V.detach().topk(count, dim=1).indices


def among(logp_M_V: Tensor, chosen_M_K: Tensor | None) -> Tensor:
    """Return the log-probabilities of the chosen tokens and of all others as one, [M, K + 1]; of all for None."""
    if chosen_M_K is None:
        return logp_M_V
    logp_M_K = logp_M_V.gather(1, chosen_M_K)
    others_M = (1.0 - logp_M_K.exp().sum(dim=1)).clamp_min(_LEAST)
    return torch.cat([logp_M_K, others_M.log()[:, None]], dim=1)


def divergence(policy_M_K: Tensor, teacher_M_K: Tensor, *, kind: Divergence) -> Tensor:
    """Return the divergence of each token in nats, [M], with the gradient of both arguments."""
    if kind == "reverse":
        return _kl(policy_M_K, teacher_M_K)
    if kind == "forward":
        return _kl(teacher_M_K, policy_M_K)
    middle_M_K = torch.logaddexp(policy_M_K, teacher_M_K) - math.log(2.0)
    return 0.5 * (_kl(policy_M_K, middle_M_K) + _kl(teacher_M_K, middle_M_K))


def _kl(a_M_K: Tensor, b_M_K: Tensor) -> Tensor:
    # sum_k a_k (log a_k - log b_k)
    return (a_M_K.exp() * (a_M_K - b_M_K)).sum(dim=1)
