"""The losses of this distribution: PPO's clipped objective, its variants, and plain policy gradients.

Notation: r_t = pi(y_t) / pi_old(y_t) is the ratio of token t, A_t its advantage, and sg(x) is x without its gradient.
All tensors are [M].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from agl.errors import ConfigError
from agl_objectives.contract import LossTerms
from agl_objectives.entries import loss
from agl_objectives.typed_torch import unique

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from agl_objectives.contract import TokenBatch


@loss("ppo-clip")
@dataclass(frozen=True, slots=True, kw_only=True)
class PPOClip:
    """`max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`, PPO's clipped objective.

    Schulman et al. 2017, arXiv 1707.06347, equation 7, with separate bounds (DAPO, arXiv 2503.14476, section 3.1).
    If `clip_dual` is set, the loss of a token with A < 0 is at most -A clip_dual (Ye et al. 2020, arXiv 1912.09729,
    equation 5). The counts `clipped_low` and `clipped_high` are the tokens whose gradient a bound has removed.

    Args:
        clip_low: Lower clip distance of the ratio, epsilon.
        clip_high: Upper clip distance of the ratio, DAPO's epsilon_high. A larger one lets unlikely tokens grow more.
        clip_dual: Ratio, above 1, from which on the loss of a token with a negative advantage is constant; 0 for no
            bound.
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
        clipped_M = ratio_M.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)  # beyond a bound the gradient is 0
        # -min(A r, A clip(r)) = max(-A r, -A clip(r)).
        # The minimum is pessimistic: moving r beyond a bound gains nothing, but the gradient back still acts.
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


@loss("cispo")
@dataclass(frozen=True, slots=True, kw_only=True)
class CISPO:
    """`-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi`: every token keeps a gradient, with a bounded weight.

    MiniMax 2025, arXiv 2506.13585, equations 4 and 5. The paper has only an upper bound on r, which is `clip_low = 1`,
    and does not give its value.

    Args:
        clip_low: Lower clip distance of the weight; 1 means no lower bound.
        clip_high: Upper clip distance of the weight.
    """

    clip_low: float = 1.0
    clip_high: float = 0.28

    def __post_init__(self) -> None:
        at_least_zero("cispo", clip_low=self.clip_low, clip_high=self.clip_high)

    def __call__(self, tokens: TokenBatch) -> LossTerms:
        """Return the loss of every token."""
        # sg(r): with a gradient of its own, r would add the term -A r log pi grad log pi.
        ratio_M = ratio(tokens).detach()
        # PPO drops the gradient of a token beyond the bound. Here only its weight stops growing, so the rare
        # tokens on which long reasoning turns still learn.
        bounded_M = ratio_M.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        # The value of this term has no meaning, only its gradient -w A grad log pi.
        loss_M = -bounded_M * tokens.advantages_M * tokens.logp_M
        clipped = (ratio_M != bounded_M) & (tokens.weight_M > 0)
        return LossTerms(loss_M=loss_M, counts={"clipped": int(clipped.sum())})


@loss("sapo", aggregation="sequence")
@dataclass(frozen=True, slots=True, kw_only=True)
class SAPO:
    """`-A sigmoid(tau (r - 1)) 4 / tau`, a soft gate in place of the clip.

    Gao et al. 2025, arXiv 2511.20347; tau is `tau_positive` where A > 0, else `tau_negative`.
    At r = 1 the gradient is that of -A r. It fades as r moves away from 1.

    Args:
        tau_positive: Steepness of the gate for tokens with a positive advantage.
        tau_negative: Steepness of the gate for all other tokens. It is larger by default, because pushing tokens down
            spreads probability over the whole vocabulary.
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        above_zero("sapo", tau_positive=self.tau_positive, tau_negative=self.tau_negative)

    def __call__(self, tokens: TokenBatch) -> LossTerms:
        """Return the loss of every token."""
        advantages_M = tokens.advantages_M
        tau_M = torch.where(advantages_M > 0, self.tau_positive, self.tau_negative).to(advantages_M.dtype)
        # d/dr of sigmoid(tau (r - 1)) 4 / tau is 4 s (1 - s), with s the sigmoid: 1 at r = 1, and smaller on either
        # side, where the clip would jump to 0.
        gate_M = torch.sigmoid(tau_M * (ratio(tokens) - 1.0)) * (4.0 / tau_M)
        return LossTerms(loss_M=-gate_M * advantages_M)


ROLLOUT_LIMIT = 10.0
"""Upper bound on the logarithm of a rollout's ratio, as in VERL."""


@loss("gspo", aggregation="sequence", surveys_ratios=True)
@dataclass(frozen=True, slots=True, kw_only=True)
class GSPO:
    """`max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high))` with the ratio of the rollout, s = exp(mean_t log r_t).

    Zheng et al. 2025, arXiv 2507.18071, equations 5 to 7, in the form GSPO-token, which allows an advantage per token:
    s_t = sg(s) pi(y_t) / sg(pi(y_t)) has the value s and the gradient s grad log pi(y_t). With one advantage per
    rollout and `aggregation = "sequence"` this is GSPO itself. The default bounds are the paper's (section 5.1). PPO's
    bounds would never bind, because a mean moves far less than the log-ratio of a single token.

    Args:
        clip_low: Lower clip distance of the rollout's ratio.
        clip_high: Upper clip distance of the rollout's ratio.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __post_init__(self) -> None:
        at_least_zero("gspo", clip_low=self.clip_low, clip_high=self.clip_high)

    def survey(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        """Return for every token the logarithm of its rollout's ratio."""
        # log s = mean_t log r_t = (log pi(y) - log pi_old(y)) / |y|: the ratio of whole answers, per token, so that its
        # range does not depend on their length.
        return {"log_ratio_M": rollout_mean(tokens.logp_M - tokens.old_M, tokens)}

    def __call__(self, tokens: TokenBatch) -> LossTerms:
        """Return the loss of every token."""
        advantages_M = tokens.advantages_M
        # log s_t: the value is log s, the first two terms add only the gradient grad log pi(y_t).
        log_M = tokens.logp_M - tokens.logp_M.detach() + tokens.extras["log_ratio_M"]
        ratio_M = torch.exp(log_M.clamp(max=ROLLOUT_LIMIT))
        # max(-A s, -A clip(s)): all tokens of a rollout are clipped together, because one reward judged them together.
        free_M = -advantages_M * ratio_M
        clipped_M = -advantages_M * ratio_M.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        # The clipped term is larger exactly where the bound has removed the gradient.
        bound = (clipped_M > free_M).detach() & (tokens.weight_M > 0)
        return LossTerms(loss_M=torch.maximum(free_M, clipped_M), counts={"clipped": int(bound.sum())})


@loss("gmpo", aggregation="sequence", surveys_ratios=True)
@dataclass(frozen=True, slots=True, kw_only=True)
class GMPO:
    """`-mean_t(A) exp(mean_t x_t)`, where x_t is the clipped log-ratio: a single token hardly moves a geometric mean.

    Zhao et al. 2025, arXiv 2507.20673, with x = sign(A) min(sign(A) log r, sign(A) clip(log r, -clip_low, clip_high)).
    Every token has the value of its whole rollout with the gradient of its own x_t: sg(exp(mean x)) exp(x_t - sg(x_t)).
    The mean of these over the tokens (`aggregation = "sequence"`) has the value and the gradient of the paper's loss.

    Args:
        clip_low: Clip distance of a token's log-ratio below 0, 0.4 in the paper.
        clip_high: Clip distance of a token's log-ratio above 0, 0.4 in the paper.
    """

    clip_low: float = 0.4
    clip_high: float = 0.4

    def __post_init__(self) -> None:
        at_least_zero("gmpo", clip_low=self.clip_low, clip_high=self.clip_high)

    def survey(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        """Return for every token the mean clipped log-ratio and the mean advantage of its rollout."""
        return {
            "log_ratio_M": rollout_mean(self._clipped(tokens), tokens),
            "advantage_M": rollout_mean(tokens.advantages_M, tokens),
        }

    def __call__(self, tokens: TokenBatch) -> LossTerms:
        """Return the loss of every token."""
        clipped_M = self._clipped(tokens)
        own_M = clipped_M - clipped_M.detach()  # 0 in value, with the token's gradient
        # exp(mean x) is the geometric mean of the clipped ratios; GRPO takes the arithmetic one, which a single large
        # ratio dominates.
        ratio_M = torch.exp((tokens.extras["log_ratio_M"] + own_M).clamp(max=ROLLOUT_LIMIT))
        changed = (clipped_M != tokens.logp_M - tokens.old_M) & (tokens.weight_M > 0)
        return LossTerms(loss_M=-tokens.extras["advantage_M"] * ratio_M, counts={"clipped": int(changed.sum())})

    def _clipped(self, tokens: TokenBatch) -> Tensor:
        """Return x_t of every token, [M]; if a bound binds, x_t is constant and has no gradient."""
        log_M, sign_M = log_ratio(tokens), torch.sign(tokens.advantages_M)
        bounded_M = log_M.clamp(-self.clip_low, self.clip_high)
        # The min is pessimistic, as PPO's: for A > 0 it bounds log r from above, for A < 0 from below.
        return sign_M * torch.minimum(sign_M * log_M, sign_M * bounded_M)


ROUNDING = 1e-8
"""Small constant that is added to numerator and denominator of a quotient of probabilities, as in VERL."""


@loss("dppo")
@dataclass(frozen=True, slots=True, kw_only=True)
class DPPO:
    """`-A sg(min(r, ratio_max)) log pi` for tokens within a trust region, and 0 for those that left it towards A.

    Qi et al. 2026, arXiv 2602.04879. The trust region is a bound on the divergence of a token's binary distribution
    (this token or any other), because a ratio says little about unlikely tokens. With p = pi(y_t) and q = pi_old(y_t):

        tv    p - q <= clip_high if A > 0, else q - p <= clip_low
        kl    q log(q / p) + (1 - q) log((1 - q) / (1 - p)) is at most clip_high if A > 0 and p > q,
              and at most clip_low if A <= 0 and p < q

    Args:
        divergence: `tv` or `kl`.
        clip_low: Largest divergence of a token with a negative advantage, or with 0.
        clip_high: Largest divergence of a token with a positive advantage.
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
            # The policy gradient with importance weights, E_old[r A grad log pi]; the bound on r limits its variance.
            weight_M = ratio(tokens).clamp(max=self.ratio_max) * inside_M
        masked = ~inside_M & (tokens.weight_M > 0)
        # The weight is a constant, so the gradient is -A weight grad log pi, and the value has no meaning.
        loss_M = -tokens.advantages_M * weight_M * tokens.logp_M
        return LossTerms(loss_M=loss_M, counts={"masked": int(masked.sum())})

    def _inside(self, tokens: TokenBatch) -> Tensor:
        """Return a mask of the tokens that may move further in the direction of their advantage, [M] bool."""
        p_M, q_M = torch.exp(tokens.logp_M), torch.exp(tokens.old_M)
        if self.divergence == "tv":
            # Total variation of two binary distributions is |p - q|. A token with A > 0 moves p up, so only p - q can
            # leave the region; with A <= 0 only q - p.
            up, down = p_M - q_M <= self.clip_high, p_M - q_M >= -self.clip_low
        else:
            # KL(q, p) of (this token, any other): q log(q / p) + (1 - q) log((1 - q) / (1 - p)). It is never negative,
            # so the sign of p - q says on which side the token is.
            others_M = torch.log((1.0 - q_M + ROUNDING) / (1.0 - p_M + ROUNDING))
            kl_M = q_M * (tokens.old_M - tokens.logp_M) + (1.0 - q_M) * others_M
            up, down = (kl_M <= self.clip_high) | (p_M <= q_M), (kl_M <= self.clip_low) | (p_M >= q_M)
        return torch.where(tokens.advantages_M > 0, up, down)


@loss("gpg")
def gpg(tokens: TokenBatch) -> LossTerms:
    """Return `-A log pi`, the plain policy gradient (Chu et al. 2025, arXiv 2504.02546)."""
    # grad E[R] = E[A grad log pi] (Williams 1992): the loss whose gradient is -A grad log pi, without a ratio or a
    # bound.
    return LossTerms(loss_M=-tokens.advantages_M * tokens.logp_M)


@loss("dro", trains_silent=True)
@dataclass(frozen=True, slots=True, kw_only=True)
class DRO:
    """`-(A log pi - beta / 2 (log r)^2)`: the plain policy gradient with a quadratic bound.

    Richemond et al. 2024, arXiv 2405.19107, with A in place of the reward minus the value. The bound also pulls back
    tokens with the advantage 0.

    Args:
        beta: Weight of the quadratic bound.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        above_zero("dro", beta=self.beta)

    def __call__(self, tokens: TokenBatch) -> LossTerms:
        """Return the loss of every token."""
        # The square is a KL penalty towards pi_old for tokens of any origin: its gradient is beta log r grad log pi,
        # which for A = 0 pulls log r back to 0.
        log_M = tokens.logp_M - tokens.old_M
        return LossTerms(loss_M=-(tokens.logp_M * tokens.advantages_M - 0.5 * self.beta * log_M.square()))


@loss("clip-cov")
@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCov:
    """PPO's clipped loss, but 0 for a few tokens of high covariance (`covariance`), which cost most entropy.

    arXiv 2505.22617, Clip-Cov. The tokens that are held back have a covariance between `cov_low` and `cov_high`. The
    paper draws them at random. Here they are taken at even distances in the order of their covariance, so that an
    update does not depend on a random state. Tokens of equal covariance keep their order in the update, so only between
    these does the order of its rows decide.

    Args:
        clip_low: Lower clip distance of the ratio.
        clip_high: Upper clip distance of the ratio.
        ratio: Share of the update's tokens that are held back. At least one token is, if any is in the range.
        cov_low: Smallest covariance of a token that is held back.
        cov_high: Largest covariance of a token that is held back.
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
        # Where A and log pi are both above their means, an update makes a likely token likelier, and entropy falls: the
        # change of entropy is about -lr Cov(A, log pi).
        free_M, clipped_M = self._terms(tokens)
        # Tokens whose gradient the clip has removed are not chosen.
        chosen_M = counted_M & (cov_M > self.cov_low) & (cov_M < self.cov_high) & ~(clipped_M > free_M)
        places = chosen_M.nonzero()[:, 0]
        count = min(len(places), max(int(self.ratio * int(counted_M.sum())), 1))
        kept_M = torch.ones_like(cov_M)
        if count:
            # Even distances: index k of n tokens in order is k n / count, for k = 0 to count - 1.
            order = places[cov_M[places].argsort(stable=True)]
            kept_M[order[torch.arange(count) * len(order) // count]] = 0.0
        return {"kept_M": kept_M}

    def __call__(self, tokens: TokenBatch) -> LossTerms:
        """Return the loss of every token."""
        kept_M = tokens.extras["kept_M"]
        loss_M = torch.maximum(*self._terms(tokens)) * kept_M
        return LossTerms(loss_M=loss_M, counts={"held_back": int((kept_M == 0).sum())})

    def _terms(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return -A r and -A clip(r), [M] each."""
        ratio_M = ratio(tokens)
        clipped_M = ratio_M.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        return -tokens.advantages_M * ratio_M, -tokens.advantages_M * clipped_M


@loss("kl-cov", trains_silent=True, needs_updates=True)
@dataclass(frozen=True, slots=True, kw_only=True)
class KLCov:
    """`-A r`, plus a penalty `kl_coef |log r|` for the tokens of largest covariance (`covariance`).

    arXiv 2505.22617, KL-Cov. A token with the advantage 0 may be penalised. In the first update of a step r = 1, at
    which `|log r|` has no gradient, so a step needs several updates.

    Args:
        ratio: Share of the update's tokens that are penalised, at least one token.
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
            # The k tokens of largest covariance would lower the entropy most. They are not held back; the penalty slows
            # them.
            penalised_M[places[cov_M[places].argsort(descending=True, stable=True)[:count]]] = 1.0
        return {"penalised_M": penalised_M}

    def __call__(self, tokens: TokenBatch) -> LossTerms:
        """Return the loss of every token."""
        penalised_M, log_M = tokens.extras["penalised_M"], log_ratio(tokens)
        # |log r| has the gradient sign(log r) grad log pi: a constant pull back to pi_old, whatever the distance.
        loss_M = -tokens.advantages_M * torch.exp(log_M) + self.kl_coef * penalised_M * log_M.abs()
        return LossTerms(loss_M=loss_M, counts={"penalised": int(penalised_M.sum())})


def covariance(tokens: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return the covariance of every token, [M], and a mask of the tokens that count, [M] bool.

    The covariance is (A_t - mean A) (log pi_t - mean log pi). Tokens with the weight 0 do not count, and so are not in
    the means.
    """
    counted_M = tokens.weight_M > 0
    # Means are over the whole update, so a survey computes this before the first micro-batch.
    advantages, logp = tokens.advantages_M[counted_M], tokens.logp_M[counted_M]
    if not len(logp):
        return torch.zeros_like(tokens.logp_M), counted_M
    # The summand of the covariance of A and log pi over the update; its mean is the covariance.
    return (tokens.advantages_M - advantages.mean()) * (tokens.logp_M - logp.mean()), counted_M


LIMIT = 20.0
"""Largest |log-ratio|, as in VERL. exp of a larger one could overflow, and 0 times infinity would spread NaN."""


def log_ratio(tokens: TokenBatch) -> Tensor:
    """Return log pi(y_t) - log pi_old(y_t), [M], clamped to +-20; a clamped value has no gradient."""
    # At the clamp r is exp(20), far beyond every bound of the losses here.
    return (tokens.logp_M - tokens.old_M).clamp(-LIMIT, LIMIT)


def ratio(tokens: TokenBatch) -> Tensor:
    """Return r_t = pi(y_t) / pi_old(y_t), [M].

    In the first update after pi_old was computed r is 1, and the gradient of A r is A grad log pi, as in REINFORCE.
    """
    return torch.exp(log_ratio(tokens))


def rollout_mean(values_M: Tensor, tokens: TokenBatch) -> Tensor:
    """Return for every token the mean of the values of all tokens of its rollout, in all rows, [M]."""
    _, place_M = unique(tokens.rollout_M)  # [M], 0 to number of rollouts - 1
    counted_M = (tokens.weight_M > 0).to(values_M.dtype)  # a token without weight must have no effect
    size = int(place_M.max()) + 1 if len(place_M) else 0
    zeros = values_M.new_zeros(size)
    # [R] sums over the tokens of each rollout, spread back to its tokens at the end, [M].
    total = zeros.index_add(0, place_M, values_M * counted_M)
    count = zeros.index_add(0, place_M, counted_M).clamp(min=1.0)
    return (total / count)[place_M]


def at_least_zero(name: str, **values: float) -> None:
    """Raise ConfigError if a value is below 0 or NaN; the message names the value."""
    wrong = {key: value for key, value in values.items() if not value >= 0}
    if wrong:
        raise ConfigError(f"The loss {name} got {wrong}; give numbers of at least 0.")


def above_zero(name: str, **values: float) -> None:
    """Raise ConfigError if a value is not above 0; the message names the value."""
    wrong = {key: value for key, value in values.items() if not value > 0}
    if wrong:
        raise ConfigError(f"The loss {name} got {wrong}; give numbers above 0.")


def off_or_above_one(name: str, **ratios: float) -> None:
    """Raise ConfigError if a ratio is neither 0 (off) nor above 1; the message names the ratio."""
    wrong = {key: value for key, value in ratios.items() if value and not value > 1}
    if wrong:
        raise ConfigError(f"The loss {name} got {wrong}; give a ratio above 1 such as 3.0, or 0 for none.")
