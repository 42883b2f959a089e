"""Losses whose ratio belongs to a whole rollout: GSPO and GMPO.

r_t = pi(y_t) / pi_old(y_t), n the number of trained tokens of a rollout over all its rows, sg(x) is x without its
gradient. All tensors are [M].

The papers' sequence is one answer to a prompt. Here it is the rollout, with every call that is trained. The mean
over a rollout's tokens needs all its rows, which may lie in several micro-batches: `survey` takes it beforehand.
Only its value is needed, because the gradient of a mean falls apart into those of its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from agl_objectives.contract import LossTerms
from agl_objectives.parameters import at_least_zero
from agl_objectives.ratios import log_ratio, rollout_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from agl_objectives.contract import TokenBatch

LIMIT = 10.0
"""Largest logarithm of a rollout's ratio, as in VERL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GSPO:
    """`max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high))` with the ratio of the rollout, s = exp(mean_t log r_t).

    Zheng et al. 2025, arXiv 2507.18071, equations 5 to 7, as GSPO-token, which allows an
    advantage per token: s_t = sg(s) pi(y_t) / sg(pi(y_t)) has the value s and the gradient s grad log pi(y_t). With one
    advantage per rollout and `aggregation = "sequence"` this is GSPO itself. The bounds are the paper's (section 5.1);
    a mean moves far less than a token, so those of PPO would never bind.

    Args:
        clip_low: Lower clip distance of the rollout's ratio.
        clip_high: The upper one.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __post_init__(self) -> None:
        at_least_zero("gspo", clip_low=self.clip_low, clip_high=self.clip_high)

    def survey(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        """Return the logarithm of the rollout's ratio at each of its tokens."""
        return {"log_ratio_M": rollout_mean(tokens.logp_M - tokens.old_M, tokens)}

    def __call__(self, tokens: TokenBatch) -> LossTerms:
        """Return the loss of every token."""
        advantages_M = tokens.advantages_M
        log_M = tokens.logp_M - tokens.logp_M.detach() + tokens.extras["log_ratio_M"]
        ratio_M = torch.exp(log_M.clamp(max=LIMIT))
        free_M = -advantages_M * ratio_M
        clipped_M = -advantages_M * ratio_M.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        bound = (clipped_M > free_M).detach() & (tokens.weight_M > 0)
        return LossTerms(loss_M=torch.maximum(free_M, clipped_M), counts={"clipped": int(bound.sum())})


@dataclass(frozen=True, slots=True, kw_only=True)
class GMPO:
    """`-mean_t(A) exp(mean_t x_t)`, x_t the clipped log-ratio: a geometric mean, which single tokens hardly move.

    Zhao et al. 2025, arXiv 2507.20673: x = sign(A) min(sign(A) log r, sign(A) clip(log r, -clip_low,
    clip_high)). Every token of a rollout carries its rollout's value, sg(exp(mean x)) exp(x_t - sg(x_t)), whose mean
    over the tokens (`aggregation = "sequence"`) has the value and the gradient of the paper's.

    Args:
        clip_low: Lower bound of the log-ratio of a token, 0.4 in the paper.
        clip_high: The upper one, 0.4 in the paper.
    """

    clip_low: float = 0.4
    clip_high: float = 0.4

    def __post_init__(self) -> None:
        at_least_zero("gmpo", clip_low=self.clip_low, clip_high=self.clip_high)

    def survey(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        """Return the mean clipped log-ratio of the rollout and its mean advantage at each of its tokens."""
        return {
            "log_ratio_M": rollout_mean(self._clipped(tokens), tokens),
            "advantage_M": rollout_mean(tokens.advantages_M, tokens),
        }

    def __call__(self, tokens: TokenBatch) -> LossTerms:
        """Return the loss of every token."""
        clipped_M = self._clipped(tokens)
        own_M = clipped_M - clipped_M.detach()  # 0 in value, with the token's gradient
        ratio_M = torch.exp((tokens.extras["log_ratio_M"] + own_M).clamp(max=LIMIT))
        changed = (clipped_M != tokens.logp_M - tokens.old_M) & (tokens.weight_M > 0)
        return LossTerms(loss_M=-tokens.extras["advantage_M"] * ratio_M, counts={"clipped": int(changed.sum())})

    def _clipped(self, tokens: TokenBatch) -> Tensor:
        """Return x, [M]: where a bound binds it is constant and has no gradient."""
        log_M, sign_M = log_ratio(tokens), torch.sign(tokens.advantages_M)
        bounded_M = log_M.clamp(-self.clip_low, self.clip_high)
        return sign_M * torch.minimum(sign_M * log_M, sign_M * bounded_M)
