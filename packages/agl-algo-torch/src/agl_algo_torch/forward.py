"""Forward passes without a gradient: what a model says about tokens that were sampled before.

The algorithms need it for log pi_old and log pi_ref. Passes with a gradient stand in each algorithm's own loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from agl_algo_torch.batch import micro_batches
from agl_algo_torch.packing import packs_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from agl_algo_torch.batch import RowSample


@torch.no_grad()
def recompute_logprobs(
    model: nn.Module, samples: Sequence[RowSample], *, token_budget: int, device: torch.device
) -> list[Tensor]:
    """Return the log-probabilities of each sample's trained tokens, [T] per sample on the CPU, 0 elsewhere.

    They are taken at the temperature that each token was sampled with, and come in the order of `samples`.
    """
    found: dict[int, Tensor] = {}
    # Weights are 0 because nothing is summed here.
    weight, is_packed = [0.0] * len(samples), packs_rows(model)
    for batch in micro_batches(samples, weight, token_budget=token_budget, device=device, is_packed=is_packed):
        found |= batch.scatter(batch.logprobs(model))  # [M] -> [T] per row
    return [found[index] for index in range(len(samples))]  # micro-batches come longest first
