"""Applies AdamW with warm-up and gradient clipping.

The update itself is torch's, or that of `adamw8bit`. This module chooses the parameters that decay, computes the
learning rate, and skips gradients that are not finite. The rate depends on the update number alone, for the warm-up,
and on the share of the planned updates that is left, for the decay. A resumed run therefore continues on the same
curve, and steps without an update do not stretch it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from agl_algo_torch.learner.adamw8bit import AdamW8bit

if TYPE_CHECKING:
    from torch import nn

    from agl_objectives.settings import Optim


def learning_rate(settings: Optim, update: int, *, left: float = 1.0) -> float:
    """Return the learning rate of update number `update`, counted from 0; a decay reaches 0 where `left` is 0."""
    # Update 0 already moves, by lr / (warmup + 1); update `warmup` is the first at the full rate. Early moments of
    # AdamW are means of few gradients, and full steps along them would go far in accidental directions.
    warm = min(1.0, (update + 1) / (settings.warmup + 1))
    if settings.decay == "constant":
        return settings.lr * warm
    # linear: left; cosine: (1 - cos(pi left)) / 2, flat at both ends
    shape = left if settings.decay == "linear" else 0.5 * (1.0 - math.cos(math.pi * left))
    return settings.lr * warm * shape


def build_optimizer(model: nn.Module, settings: Optim) -> torch.optim.Optimizer:
    """Return AdamW over the trainable parameters: weight decay applies to matrices, but not to vectors."""
    trained = [p for p in model.parameters() if p.requires_grad]
    # Decay pulls weights towards 0. That is meant for the matrices; a norm's scale of 0 would switch its layer off.
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if settings.moments == "8bit":
        return AdamW8bit(groups, lr=settings.lr, betas=settings.betas)
    return torch.optim.AdamW(
        groups,
        lr=settings.lr,
        betas=settings.betas,
        fused=trained[0].device.type in {"cuda", "cpu"},  # one kernel, without temporary tensors of a weight's size
    )


def apply_gradients(optimizer: torch.optim.Optimizer, settings: Optim, *, update: int, left: float = 1.0) -> float:
    """Clip the gradient, do one update and clear the gradient; returns the gradient's 2-norm before clipping.

    A gradient that is not finite is cleared without an update; weights and moments stay as they were.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # g <- g * min(1, max_grad_norm / |g|): the direction stays, only long steps are shortened.
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm))
    if not math.isfinite(norm):
        # One NaN would enter the moments and every weight, and never leave them again.
        optimizer.zero_grad(set_to_none=True)
        return norm
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(settings, update, left=left)
    optimizer.step()  # pyright: ignore[reportUnknownMemberType] - untyped in torch
    optimizer.zero_grad(set_to_none=True)
    return norm
