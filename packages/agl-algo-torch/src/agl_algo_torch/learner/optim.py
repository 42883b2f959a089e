"""AdamW with warm-up and gradient clipping: the settings, and the few lines that apply them.

The update itself is torch's. Here are the choice of what is decayed, the learning rate, and that gradients that are
not finite change nothing. The learning rate is a pure function of the update number, so a resumed run continues
on the same curve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch

from agl.errors import ConfigError
from agl_objectives.reports import MAX_NONFINITE

if TYPE_CHECKING:
    from torch import nn

Decay = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimSettings:
    """AdamW (Loshchilov & Hutter 2017, arXiv 1711.05101, algorithm 2); vectors (norms, biases) are not decayed.

    The rate rises linearly over `warmup` updates; with `linear` or `cosine` decay it falls to zero at `total`.
    `max_grad_norm` bounds the 2-norm of the whole gradient. `max_nonfinite` gradients in a row that are not finite are
    skipped; one more is an error.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)  # the second is below torch's 0.999: few updates, changing gradients
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup: int = 0
    decay: Decay = "constant"
    total: int = 0
    max_grad_norm: float = 1.0
    max_nonfinite: int = MAX_NONFINITE

    def __post_init__(self) -> None:
        if not (self.lr > 0 and self.max_grad_norm > 0):
            raise ConfigError(f"lr is {self.lr} and max_grad_norm {self.max_grad_norm}; both must be above 0.")
        if not (self.weight_decay >= 0 and self.warmup >= 0 and self.max_nonfinite >= 0):
            raise ConfigError(
                f"weight_decay is {self.weight_decay}, warmup {self.warmup} and max_nonfinite {self.max_nonfinite}; "
                "all must be at least 0."
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas is {self.betas}; both must be at least 0 and below 1.")
        if self.decay not in get_args(Decay):
            raise ConfigError(f"decay is {self.decay!r}, which is unknown. Use one of: {', '.join(get_args(Decay))}.")
        if self.decay != "constant" and self.total < 1:
            raise ConfigError(f"decay {self.decay!r} needs the total number of updates, but total is {self.total}.")


def learning_rate(settings: OptimSettings, update: int) -> float:
    """Return the rate of update number `update`, counted from 0."""
    # Update 0 already moves, by lr / (warmup + 1); update `warmup` is the first at the full rate. Early moments of
    # AdamW are means of few gradients, and full steps along them would go far in accidental directions.
    warm = min(1.0, (update + 1) / (settings.warmup + 1))
    if settings.decay == "constant":
        return settings.lr * warm
    left = max(0.0, 1.0 - update / settings.total)  # from 1 to 0, and 0 beyond the end
    # linear: left; cosine: (1 - cos(pi left)) / 2, flat at both ends
    shape = left if settings.decay == "linear" else 0.5 * (1.0 - math.cos(math.pi * left))
    return settings.lr * warm * shape


def build_optimizer(model: nn.Module, settings: OptimSettings) -> torch.optim.AdamW:
    """Return an optimizer over the trainable parameters, matrices and vectors in a group each."""
    trained = [p for p in model.parameters() if p.requires_grad]
    # Decay pulls weights towards 0. That is meant for the matrices; a norm's scale of 0 would switch its layer off.
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        fused=trained[0].is_cuda,  # one kernel for all parameters
    )


def apply_gradients(optimizer: torch.optim.AdamW, settings: OptimSettings, *, update: int) -> float:
    """Clip the gradient, do one update and clear the gradient; returns the 2-norm before clipping.

    A gradient that is not finite is cleared too, and leaves weights and moments as they were.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # g <- g * min(1, max_grad_norm / |g|): the direction stays, only long steps are shortened.
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm))
    if not math.isfinite(norm):
        # One NaN would enter the moments and every weight, and never leave them again.
        optimizer.zero_grad(set_to_none=True)
        return norm
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(settings, update)
    optimizer.step()  # pyright: ignore[reportUnknownMemberType] - untyped in torch
    optimizer.zero_grad(set_to_none=True)
    return norm
