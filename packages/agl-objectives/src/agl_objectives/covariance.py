"""Losses that hold back the few tokens which cost the policy its entropy: clip-cov and kl-cov.

Cui et al. 2025, arXiv 2505.22617. The entropy of a policy falls with the covariance of log-probability and advantage,
and a few tokens make most of it:

    cov_t = (A_t - mean A) (log pi(y_t) - mean log pi)        over the N trained tokens of the update

Both losses compare all tokens of an update, so they take them in a `survey`. VERL compares those of a micro-batch,
which makes the choice depend on the memory of the machine.

r_t = pi(y_t) / pi_old(y_t). All tensors are [M].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from agl_objectives.contract import LossTerms
from agl_objectives.parameters import above_zero, at_least_zero
from agl_objectives.ratios import log_ratio, ratio

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from agl_objectives.contract import TokenBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCov:
    """PPO's clipped loss, and none for `ratio` of the tokens whose covariance is between `cov_low` and `cov_high`.

    The paper draws these tokens at random. Here they are taken at even distances in the order of
    their covariance, so that an update depends neither on a random state nor on the order of its rows.

    Args:
        clip_low: Lower clip distance of r.
        clip_high: The upper one.
        ratio: Share of the update's tokens that are held back, at least one token; fewer where fewer are in range.
        cov_low: Least covariance of a token that is held back.
        cov_high: Its largest covariance.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0

    def __post_init__(self) -> None:
        at_least_zero("clip-cov", clip_low=self.clip_low, clip_high=self.clip_high)
        above_zero("clip-cov", ratio=self.ratio)

    def survey(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        """Return 0 for the tokens that are held back and 1 for the others."""
        cov_M, counted_M = covariance(tokens)
        free_M, clipped_M = self._terms(tokens)
        # Those that the clip stops already are not chosen again.
        chosen_M = counted_M & (cov_M > self.cov_low) & (cov_M < self.cov_high) & ~(clipped_M > free_M)
        places = chosen_M.nonzero()[:, 0]
        count = min(len(places), max(int(self.ratio * int(counted_M.sum())), 1))
        kept_M = torch.ones_like(cov_M)
        if count:
            order = places[cov_M[places].argsort()]
            kept_M[order[torch.arange(count) * len(order) // count]] = 0.0
        return {"kept_M": kept_M}

    def __call__(self, tokens: TokenBatch) -> LossTerms:
        """Return the loss of every token."""
        kept_M = tokens.extras["kept_M"]
        loss_M = torch.maximum(*self._terms(tokens)) * kept_M
        return LossTerms(loss_M=loss_M, counts={"held_back": int((kept_M == 0).sum())})

    def _terms(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return -A r and -A clip(r)."""
        ratio_M = ratio(tokens)
        clipped_M = ratio_M.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        return -tokens.advantages_M * ratio_M, -tokens.advantages_M * clipped_M


@dataclass(frozen=True, slots=True, kw_only=True)
class KLCov:
    """`-A r`, plus `kl_coef |log r|` for the `ratio` of the update's tokens whose covariance is largest.

    A token of advantage 0 may be among them. In a step's first update r = 1, where `|log r|` has no gradient: a step
    needs several.

    Args:
        ratio: Share of the update's tokens that are held near the old policy, at least one token.
        kl_coef: Weight of the penalty.
    """

    ratio: float = 2e-4
    kl_coef: float = 1.0

    def __post_init__(self) -> None:
        above_zero("kl-cov", ratio=self.ratio)
        at_least_zero("kl-cov", kl_coef=self.kl_coef)

    def survey(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        """Return 1 for the tokens that are penalised and 0 for the others."""
        cov_M, counted_M = covariance(tokens)
        places = counted_M.nonzero()[:, 0]
        penalised_M = torch.zeros_like(cov_M)
        if len(places):
            count = min(len(places), max(1, int(len(places) * self.ratio)))
            penalised_M[places[torch.topk(cov_M[places], count).indices]] = 1.0
        return {"penalised_M": penalised_M}

    def __call__(self, tokens: TokenBatch) -> LossTerms:
        """Return the loss of every token."""
        penalised_M, log_M = tokens.extras["penalised_M"], log_ratio(tokens)
        loss_M = -tokens.advantages_M * torch.exp(log_M) + self.kl_coef * penalised_M * log_M.abs()
        return LossTerms(loss_M=loss_M, counts={"penalised": int(penalised_M.sum())})


def covariance(tokens: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return cov_t, [M], and where a token counts, [M] bool: tokens without weight are in no mean."""
    counted_M = tokens.weight_M > 0
    advantages, logp = tokens.advantages_M[counted_M], tokens.logp_M[counted_M]
    if not len(logp):
        return torch.zeros_like(tokens.logp_M), counted_M
    return (tokens.advantages_M - advantages.mean()) * (tokens.logp_M - logp.mean()), counted_M
