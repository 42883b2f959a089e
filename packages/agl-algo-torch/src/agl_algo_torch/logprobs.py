"""Reads log-probabilities and entropies off logits, in any floating dtype.

M is the number of trained tokens of a micro-batch, flat over its rows in their order; V is the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(logits_M_V: Tensor, *, targets_M: Tensor, temperature_M: Tensor) -> Tensor:
    """Return the log-probability of each target under `softmax(logits / temperature)`, [M], at least float32."""
    # The sampler drew from softmax(z / tau), so that is the policy; with tau = 1 it is the model itself.
    # bfloat16 has 8 bits of precision, too few for a log-sum over a vocabulary: compute in float32 or better.
    scaled_M_V = logits_M_V.to(torch.promote_types(logits_M_V.dtype, torch.float32)) / temperature_M[:, None]
    chosen_M = scaled_M_V.gather(1, targets_M[:, None])[:, 0]  # [M], z_y / tau
    # log softmax(z)_y = z_y - logsumexp(z), which needs no [M, V] tensor of log-probabilities.
    return chosen_M - scaled_M_V.logsumexp(dim=1)


def entropy(logits_M_V: Tensor) -> Tensor:
    """Return the entropy of `softmax(logits)` per position in nats, [M], without gradient.

    The temperature is left out: this watches the model, whatever it was sampled with.
    """
    with torch.no_grad():
        logp_M_V = logits_M_V.float().log_softmax(dim=1)  # [M, V]
        return -logp_M_V.exp().mul_(logp_M_V).sum(dim=1)  # H = -sum_v p_v log p_v


def policy_entropy(logits_M_V: Tensor, *, temperature_M: Tensor) -> Tensor:
    """Return the entropy of `softmax(logits / temperature)` in nats, [M], with gradient: that of what was sampled."""
    scaled_M_V = logits_M_V.to(torch.promote_types(logits_M_V.dtype, torch.float32)) / temperature_M[:, None]
    logp_M_V = scaled_M_V.log_softmax(dim=1)
    return -(logp_M_V.exp() * logp_M_V).sum(dim=1)
