"""Losses that bound the policy's change by a divergence, or not at all: DPPO, GPG and DRO.

r_t = pi(y_t) / pi_old(y_t), p = pi(y_t), q = pi_old(y_t), sg(x) is x without its gradient. All tensors are [M].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from agl.errors import ConfigError
from agl_objectives.contract import LossTerms
from agl_objectives.parameters import above_zero, at_least_zero
from agl_objectives.ratios import ratio

if TYPE_CHECKING:
    from torch import Tensor

    from agl_objectives.contract import TokenBatch

ROUNDING = 1e-8
"""Added to both parts of a quotient of small probabilities, as in VERL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DPPO:
    """`-A sg(min(r, ratio_max)) log pi`, for the tokens that have not left the trust region in the direction of A.

    Qi et al. 2026, arXiv 2602.04879. The divergence of a token's binary distribution (this token or another) bounds
    the step, because a ratio says little about unlikely tokens:

        tv    p - q <= clip_high where A > 0, q - p <= clip_low else
        kl    q log(q / p) + (1 - q) log((1 - q) / (1 - p)) <= clip_high where A > 0 and p > q,
              <= clip_low where A <= 0 and p < q

    Args:
        divergence: `tv` or `kl`.
        clip_low: Largest divergence of tokens that are to shrink.
        clip_high: Largest divergence of tokens that are to grow.
        ratio_max: Largest weight of a token.
    """

    divergence: Literal["tv", "kl"] = "tv"
    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio_max: float = 20.0

    def __post_init__(self) -> None:
        if self.divergence not in ("tv", "kl"):
            raise ConfigError(f"The loss dppo got divergence = {self.divergence!r}; use tv or kl.")
        at_least_zero("dppo", clip_low=self.clip_low, clip_high=self.clip_high)
        above_zero("dppo", ratio_max=self.ratio_max)

    def __call__(self, tokens: TokenBatch) -> LossTerms:
        """Return the loss of every token."""
        with torch.no_grad():
            inside_M = self._inside(tokens)
            weight_M = ratio(tokens).clamp(max=self.ratio_max) * inside_M
        masked = ~inside_M & (tokens.weight_M > 0)
        loss_M = -tokens.advantages_M * weight_M * tokens.logp_M
        return LossTerms(loss_M=loss_M, counts={"masked": int(masked.sum())})

    def _inside(self, tokens: TokenBatch) -> Tensor:
        """Return where a token may move further in the direction of its advantage, [M] bool."""
        p_M, q_M = torch.exp(tokens.logp_M), torch.exp(tokens.old_M)
        if self.divergence == "tv":
            up, down = p_M - q_M <= self.clip_high, p_M - q_M >= -self.clip_low
        else:
            others_M = torch.log((1.0 - q_M + ROUNDING) / (1.0 - p_M + ROUNDING))
            kl_M = q_M * (tokens.old_M - tokens.logp_M) + (1.0 - q_M) * others_M
            up, down = (kl_M <= self.clip_high) | (p_M <= q_M), (kl_M <= self.clip_low) | (p_M >= q_M)
        return torch.where(tokens.advantages_M > 0, up, down)


def gpg(tokens: TokenBatch) -> LossTerms:
    """Return `-A log pi`, the plain policy gradient (Chu et al. 2025, arXiv 2504.02546)."""
    return LossTerms(loss_M=-tokens.advantages_M * tokens.logp_M)


@dataclass(frozen=True, slots=True, kw_only=True)
class DRO:
    """`-(A log pi - beta / 2 (log r)^2)`: the plain policy gradient with a quadratic bound.

    Richemond et al. 2024, arXiv 2405.19107, with A in place of the reward less the value. The bound pulls
    a token back whose advantage is 0 as well.

    Args:
        beta: Weight of the bound.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        above_zero("dro", beta=self.beta)

    def __call__(self, tokens: TokenBatch) -> LossTerms:
        """Return the loss of every token."""
        log_M = tokens.logp_M - tokens.old_M
        return LossTerms(loss_M=-(tokens.logp_M * tokens.advantages_M - 0.5 * self.beta * log_M.square()))
