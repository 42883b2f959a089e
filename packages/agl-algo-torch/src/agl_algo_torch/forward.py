"""Forward passes over samples without a gradient: what a model says about tokens that were sampled before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from agl_algo_torch.batch import micro_batches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from agl_algo_torch.batch import RowSample


@torch.no_grad()
def recompute_logprobs(
    model: nn.Module, samples: Sequence[RowSample], *, token_budget: int, device: torch.device
) -> list[Tensor]:
    """Return the log-probabilities of each sample's trained tokens, [T] per sample on the CPU, 0 elsewhere."""
    found: dict[int, Tensor] = {}
    for batch in micro_batches(samples, [0.0] * len(samples), token_budget=token_budget, device=device):
        found |= batch.scatter(batch.logprobs(batch.logits(model)))
    return [found[index] for index in range(len(samples))]
