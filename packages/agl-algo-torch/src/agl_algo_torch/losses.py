"""Policy-gradient losses over trained tokens, as pure functions of tensors in any floating dtype.

Notation: M is the number of trained tokens of a micro-batch (mask 1), flat over its rows in their order; V is the
vocabulary. `logp_M` requires grad; everything else is data.
A loss is the sum of `weight_M * loss_M` divided by a `total`. Weights and total belong to the whole update, so the
losses of its micro-batches add up to the update's, and no function here divides by a number of rows.
Functions of tokens take padded tensors as well, with weight 0 in the padding.

`token_weight` and `update_total` make a rollout's share independent of its number of rows:

    token      1 / tokens of the update                   every token counts the same (DAPO, arXiv 2503.14476, eq. 8)
    sequence   (1 / tokens of the rollout) / rollouts     every rollout counts the same (GRPO, arXiv 2402.03300, eq. 3)
    constant   (1 / constant) / rollouts                  no length bias (Dr. GRPO, arXiv 2503.20783, section 3.1)

Rows, masks and micro-batches are made in `batch`, advantages in `advantages` and `gae`.
Sums are taken in the order of VERL's `core_algos`, so that losses over tokens are the same to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from agl.errors import ConfigError

Aggregation = Literal["token", "sequence", "constant"]
KL = Literal["k1", "k2", "k3"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)
KLS: tuple[str, ...] = get_args(KL)
PENALTIES = ("k2", "k3")
"""The KL estimates that have a gradient as a term of the loss."""


def token_weight(aggregation: Aggregation, *, rollout_tokens: int, constant: int = 1) -> float:
    """Return the weight of one trained token of a rollout that has `rollout_tokens` of them over all its rows."""
    if aggregation == "token":
        return 1.0
    if aggregation == "sequence":
        return 1.0 / rollout_tokens  # over all rows of the rollout: splitting it into rows changes nothing
    if aggregation == "constant":
        return 1.0 / constant  # the same for a token of a short and of a long answer
    raise ConfigError(f"The aggregation {aggregation!r} is unknown. Use one of: {', '.join(AGGREGATIONS)}.")


def update_total(aggregation: Aggregation, *, tokens: int, rollouts: int) -> float:
    """Return the divisor of weighted sums; both counts are the whole update's, silent rollouts included."""
    # Rollouts with advantage 0 add nothing to the sum but stay here, so leaving them out of the forward pass saves
    # time and does not make the gradient of the others larger.
    return float(tokens if aggregation == "token" else rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedLoss:
    """A loss to differentiate, and numbers to log that carry no gradient.

    `clipped_low` and `clipped_high` count tokens; `ratio_max` is the largest ratio to the old policy.
    """

    loss: Tensor
    clipped_low: int
    clipped_high: int
    ratio_max: float


def policy_loss(
    logp_M: Tensor,
    *,
    old_logp_M: Tensor,
    advantages_M: Tensor,
    weight_M: Tensor,
    total: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    clip_dual: float = 0.0,
    importance_M: Tensor | None = None,
) -> ClippedLoss:
    """Return `sum w * c * max(-A r, -A clip(r, 1 - low, 1 + high)) / total`, r = exp(logp - old_logp).

    PPO's clipped objective (Schulman et al. 2017, arXiv 1707.06347, equation 7) with separate bounds
    (DAPO, arXiv 2503.14476, section 3.1). Where A < 0 and `clip_dual` is given, a term is at most -A clip_dual
    (Ye et al. 2020, arXiv 1912.09729, equation 5). `importance_M` is c, see `truncated_importance`; 1 when absent.
    """
    # r_t = pi(y_t) / pi_old(y_t).  [M]
    # In the first update after pi_old was computed r is 1, and the gradient of A r is A grad log pi: REINFORCE.
    ratio_M = torch.exp(logp_M - old_logp_M)
    clipped_M = ratio_M.clamp(1.0 - clip_low, 1.0 + clip_high)  # [M]; outside of the bounds its gradient is 0
    # -min(A r, A clip(r)) = max(-A r, -A clip(r)).  [M]
    # The minimum is pessimistic: it takes away the gain of moving r beyond a bound, and leaves the way back open.
    loss_M = torch.maximum(-advantages_M * ratio_M, -advantages_M * clipped_M)
    if clip_dual:
        # For A < 0 the term above is -A r, which grows with r without bound: one token that was unlikely under
        # pi_old could dominate the update. Beyond r = clip_dual the term is constant and has no gradient.
        loss_M = torch.where(advantages_M < 0, torch.minimum(loss_M, -advantages_M * clip_dual), loss_M)
    if importance_M is not None:
        loss_M = loss_M * importance_M
    with torch.no_grad():
        # Only tokens whose gradient the clip has removed are counted; the sign of A says which bound can bind.
        low = (ratio_M < 1.0 - clip_low) & (advantages_M < 0)
        high = (ratio_M > 1.0 + clip_high) & (advantages_M > 0)
        ratio_max = float(ratio_M.max()) if ratio_M.numel() else 1.0  # the maximum of nothing is not defined
    return ClippedLoss(
        loss=(weight_M * loss_M).sum() / total,
        clipped_low=int(low.sum()),
        clipped_high=int(high.sum()),
        ratio_max=ratio_max,
    )


def truncated_importance(old_logp_M: Tensor, behaviour_logp_M: Tensor, *, cap: float) -> Tensor:
    """Return `min(pi_old / pi_behaviour, cap)` per token, [M], without gradient.

    Truncated importance sampling (TIS; Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
    RL training"). The sampler and the trainer compute slightly different probabilities, and samples may be a few
    versions old. The weight corrects the expectation for that, and the cap bounds its variance.
    `behaviour_logp_M` are the recorded log-probabilities.
    """
    # E_behaviour[(pi_old / pi_behaviour) f] = E_old[f]. The factor is a weight of the data, not a function of the
    # parameters being trained, hence the detach. There is no lower bound: small weights do no harm.
    return torch.exp(old_logp_M.detach() - behaviour_logp_M).clamp(max=cap)


def kl_estimate(logp_M: Tensor, reference_logp_M: Tensor, *, kind: KL) -> Tensor:
    """Return per-token estimates of KL(policy || reference) from samples of the policy, [M], in nats.

    Schulman 2020, "Approximating KL divergence": with d = reference - policy log-probability, k1 = -d (unbiased),
    k2 = d^2 / 2 (its gradient is the KL's in expectation), k3 = exp(d) - d - 1 (unbiased, never negative; GRPO's,
    arXiv 2402.03300, equation 4).
    As a loss, k1 has zero gradient in expectation: use it to watch, k2 or k3 to penalise (`check_penalty`).
    """
    d_M = reference_logp_M - logp_M  # [M], log of the paper's r = reference / policy
    if kind == "k1":
        return -d_M  # grad is grad log pi, whose expectation under pi is 0
    if kind == "k2":
        return 0.5 * d_M**2  # grad is -d grad log pi = log(pi / ref) grad log pi, the KL's own score gradient
    if kind == "k3":
        return torch.exp(d_M) - d_M - 1.0  # E_pi[exp(d)] = 1, so this is k1 plus a control variate of mean 0
    raise ConfigError(f"The KL estimator {kind!r} is unknown. Use one of: {', '.join(KLS)}.")


def check_penalty(algorithm: str, kl: str) -> None:
    """Raise ConfigError for a KL estimate that is unknown, or that as a term of the loss penalises nothing."""
    if kl not in KLS:
        raise ConfigError(f"{algorithm} got kl = {kl!r}, which is unknown. Use one of: {', '.join(PENALTIES)}.")
    if kl not in PENALTIES:
        raise ConfigError(
            f"{algorithm} got kl = {kl!r}, whose gradient is 0 on average, so that it would only add noise to the "
            'loss. Use "k3", or "k2", whose gradient is that of the KL divergence.'
        )


def token_logprobs(logits_M_V: Tensor, *, targets_M: Tensor, temperature_M: Tensor) -> Tensor:
    """Return the log-probability of each target under `softmax(logits / temperature)`, [M], at least float32."""
    # The sampler drew from softmax(z / tau), so that is the policy; with tau = 1 it is the model itself.
    # bfloat16 has 8 bits of precision, too few for a log-sum over a vocabulary: compute in float32 or better.
    scaled_M_V = logits_M_V.to(torch.promote_types(logits_M_V.dtype, torch.float32)) / temperature_M[:, None]
    chosen_M = scaled_M_V.gather(1, targets_M[:, None])[:, 0]  # [M], z_y / tau
    # log softmax(z)_y = z_y - logsumexp(z), which needs no [M, V] tensor of log-probabilities.
    return chosen_M - scaled_M_V.logsumexp(dim=1)


def entropy(logits_M_V: Tensor) -> Tensor:
    """Return the entropy of `softmax(logits)` per position in nats, [M], without gradient.

    The temperature is left out: this watches the model, whatever it was sampled with.
    """
    with torch.no_grad():
        logp_M_V = logits_M_V.float().log_softmax(dim=1)  # [M, V]
        return -(logp_M_V.exp() * logp_M_V).sum(dim=1)  # H = -sum_v p_v log p_v
