"""Importance weights for tokens that were sampled with the server's numerics, or with weights a few versions old.

The sampler and the trainer compute slightly different probabilities. E_behaviour[(pi_old / pi_behaviour) f] = E_old[f],
so a weight pi_old / pi_behaviour corrects the expectation, and a bound on the weight limits the variance (truncated
importance sampling; Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"). The
level gives the weight k_t, and the mode bounds it to c_t:

    token      k_t = pi_old(y_t) / pi_behaviour(y_t)
    sequence   k_t = product of the token weights over the rollout, which is exact but has a large variance
    geometric  k_t = geometric mean of the token weights over the rollout

    truncate   c_t = min(k_t, cap)
    mask       c_t = k_t where floor <= k_t <= cap, else 0      (per token IcePop, Ling team 2025, arXiv 2510.18855)

The weight of a rollout is taken over all its rows. All tensors are [M].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from agl_objectives.typed_torch import unique

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Importance", "Level", "Mode"]

Level = Literal["token", "sequence", "geometric"]
"""The tokens that share an importance weight: a single token, or all tokens of a rollout."""

Mode = Literal["truncate", "mask"]
"""The ways of bounding a weight: lower it to the cap, or drop its token."""

LIMIT = 20.0
"""Largest |log-weight| of a rollout, as in VERL: exp of a sum over many tokens could leave the range of floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """The importance weights of an algorithm's tokens.

    Attributes:
        cap: Largest weight; 0 turns the weights off.
        level: `token`, `sequence` or `geometric`.
        mode: `truncate` or `mask`.
        floor: Smallest weight that the mode `mask` keeps.
        is_normalised: Whether weights are divided by their mean over rollouts, which preserves the gradient's size.
    """

    cap: float = 2.0
    level: Level = "token"
    mode: Mode = "truncate"
    floor: float = 0.0
    is_normalised: bool = False

    @property
    def needs_rollouts(self) -> bool:
        """True if a token's weight depends on other tokens, so that all tokens of a step must be given together."""
        return bool(self.cap) and (self.level != "token" or self.is_normalised)

    def weights(self, old_M: Tensor, behaviour_M: Tensor, *, rollout_M: Tensor) -> Tensor:
        """Return the weight of every token, [M], without gradient; if `needs_rollouts`, rollouts must be complete."""
        ratio_M = self._ratios(old_M, behaviour_M, rollout_M=rollout_M)
        # Truncation has no lower bound: small weights do no harm.
        if self.mode == "truncate":
            # The bias of min(k, cap) is small where few weights exceed the cap, and its variance is at most cap^2.
            weight_M = ratio_M.clamp(max=self.cap)
        else:
            # A token far outside was probably computed wrongly by one of the two, so its gradient is not believed at
            # all.
            inside_M = (ratio_M >= self.floor) & (ratio_M <= self.cap)
            weight_M = torch.where(inside_M, ratio_M, 0.0)
        # Self-normalised importance sampling: sum k f / sum k, a little biased, with less variance than (1 / N) sum k
        # f.
        return weight_M / _mean_of_rollouts(weight_M, rollout_M) if self.is_normalised else weight_M

    def truncated(self, old_M: Tensor, behaviour_M: Tensor, *, rollout_M: Tensor) -> Tensor:
        """Return true for every token whose k_t the mode `truncate` lowers, or leaves at the cap; [M]."""
        # Not read from the weights: divided by their mean, they lie on another scale than the cap.
        return self._ratios(old_M, behaviour_M, rollout_M=rollout_M) >= self.cap

    def _ratios(self, old_M: Tensor, behaviour_M: Tensor, *, rollout_M: Tensor) -> Tensor:
        # Detached, because the weight belongs to the data and is not a function of the parameters in training.
        log_M = old_M.detach() - behaviour_M
        if self.level != "token":
            log_M = self._of_rollouts(log_M, rollout_M)
        # k_t >= 0 with E_behaviour[k_t] = 1, but with a variance that grows with the distance of the two policies.
        return torch.exp(log_M)

    def _of_rollouts(self, log_M: Tensor, rollout_M: Tensor) -> Tensor:
        """Return for every token the sum (`sequence`) or mean (`geometric`) of the log-weights of its rollout, [M]."""
        place_M, count_R = _places(rollout_M, log_M)
        # log of a product over the rollout is the sum of log k_t; of a geometric mean, their mean.
        total_R = torch.zeros_like(count_R).index_add(0, place_M, log_M)
        found_R = total_R if self.level == "sequence" else total_R / count_R
        return found_R.clamp(-LIMIT, LIMIT)[place_M]


def _places(rollout_M: Tensor, like_M: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of each token's rollout, 0 to R - 1, [M], and the number of tokens of each rollout, [R]."""
    ids_R, place_M = unique(rollout_M)
    zeros_R = like_M.new_zeros(len(ids_R))
    return place_M, zeros_R.index_add(0, place_M, torch.ones_like(like_M))


def _mean_of_rollouts(weight_M: Tensor, rollout_M: Tensor) -> Tensor:
    """Return the mean over rollouts of each rollout's mean token weight, at least 1e-8, a scalar."""
    if not len(weight_M):
        return weight_M.new_ones(())
    place_M, count_R = _places(rollout_M, weight_M)
    # First over the tokens of a rollout, then over rollouts, so that a long rollout counts no more than a short one.
    mean_R = torch.zeros_like(count_R).index_add(0, place_M, weight_M) / count_R
    return mean_R.mean().clamp(min=1e-8)  # if all weights are masked, 0 / 1e-8 stays 0
