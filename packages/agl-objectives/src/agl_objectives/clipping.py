"""Losses with a bound on the ratio of each token: PPO's clip, CISPO's stopped weight, SAPO's soft gate.

r_t = pi(y_t) / pi_old(y_t), A_t the advantage of token t, sg(x) is x without its gradient. All tensors are [M].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from agl_objectives.contract import LossTerms
from agl_objectives.parameters import above_zero, at_least_zero, off_or_above_one
from agl_objectives.ratios import ratio

if TYPE_CHECKING:
    from agl_objectives.contract import TokenBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOClip:
    """`max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`, PPO's clipped objective.

    Schulman et al. 2017, arXiv 1707.06347, equation 7, with separate bounds (DAPO, arXiv 2503.14476, section 3.1).
    Where A < 0 and `clip_dual` is given, a term is at most -A clip_dual (Ye et al. 2020, arXiv 1912.09729, equation 5).
    `clipped_low` and `clipped_high` count the tokens whose gradient a bound has removed.

    Args:
        clip_low: Lower clip distance of the ratio, epsilon.
        clip_high: The upper one, DAPO's epsilon_high: unlikely tokens get more room to grow.
        clip_dual: Above 1, the ratio at which the loss of a negative advantage is bounded; 0 leaves it unbounded.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    clip_dual: float = 0.0

    def __post_init__(self) -> None:
        at_least_zero("ppo-clip", clip_low=self.clip_low, clip_high=self.clip_high)
        off_or_above_one("ppo-clip", clip_dual=self.clip_dual)

    def __call__(self, tokens: TokenBatch) -> LossTerms:
        """Return the loss of every token."""
        ratio_M, advantages_M = ratio(tokens), tokens.advantages_M
        clipped_M = ratio_M.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)  # outside its gradient is 0
        # -min(A r, A clip(r)) = max(-A r, -A clip(r)).
        # The minimum is pessimistic: it takes away the gain of moving r beyond a bound, and leaves the way back open.
        loss_M = torch.maximum(-advantages_M * ratio_M, -advantages_M * clipped_M)
        if self.clip_dual:
            # For A < 0 the term above is -A r, which grows with r without bound: one token that was unlikely under
            # pi_old could dominate the update. Beyond r = clip_dual the term is constant and has no gradient.
            bounded_M = torch.minimum(loss_M, -advantages_M * self.clip_dual)
            loss_M = torch.where(advantages_M < 0, bounded_M, loss_M)
        with torch.no_grad():
            # The sign of A says which bound can bind.
            low = (ratio_M < 1.0 - self.clip_low) & (advantages_M < 0) & (tokens.weight_M > 0)
            high = (ratio_M > 1.0 + self.clip_high) & (advantages_M > 0) & (tokens.weight_M > 0)
        return LossTerms(loss_M=loss_M, counts={"clipped_low": int(low.sum()), "clipped_high": int(high.sum())})


@dataclass(frozen=True, slots=True, kw_only=True)
class CISPO:
    """`-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi`: every token keeps a gradient, with a bounded weight.

    MiniMax 2025, arXiv 2506.13585, equations 4 and 5. The paper bounds r from above alone, which is `clip_low = 1`, and
    tunes the upper bound without giving its value.

    Args:
        clip_low: Lower clip distance of the weight; 1 leaves it unbounded below.
        clip_high: The upper one.
    """

    clip_low: float = 1.0
    clip_high: float = 0.28

    def __post_init__(self) -> None:
        at_least_zero("cispo", clip_low=self.clip_low, clip_high=self.clip_high)

    def __call__(self, tokens: TokenBatch) -> LossTerms:
        """Return the loss of every token."""
        ratio_M = ratio(tokens).detach()
        bounded_M = ratio_M.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        # The value is arbitrary, for log pi is: only its gradient -w A grad log pi means something.
        loss_M = -bounded_M * tokens.advantages_M * tokens.logp_M
        clipped = (ratio_M != bounded_M) & (tokens.weight_M > 0)
        return LossTerms(loss_M=loss_M, counts={"clipped": int(clipped.sum())})


@dataclass(frozen=True, slots=True, kw_only=True)
class SAPO:
    """`-A sigmoid(tau (r - 1)) 4 / tau`, a soft gate in place of the clip.

    Gao et al. 2025, arXiv 2511.20347; tau is `tau_positive` where A > 0, else `tau_negative`.
    At r = 1 its gradient is that of -A r, and it fades as r leaves 1.

    Args:
        tau_positive: The gate's steepness for tokens that are to grow.
        tau_negative: The same for the others; steeper, because pushing tokens down spreads mass over the vocabulary.
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        above_zero("sapo", tau_positive=self.tau_positive, tau_negative=self.tau_negative)

    def __call__(self, tokens: TokenBatch) -> LossTerms:
        """Return the loss of every token."""
        advantages_M = tokens.advantages_M
        tau_M = torch.where(advantages_M > 0, self.tau_positive, self.tau_negative).to(advantages_M.dtype)
        gate_M = torch.sigmoid(tau_M * (ratio(tokens) - 1.0)) * (4.0 / tau_M)
        return LossTerms(loss_M=-gate_M * advantages_M)
