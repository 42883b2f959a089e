"""Turns the values of calls into advantages, as pure functions of tensors that can be checked by hand.

Five estimators are here. They differ in what a rollout's score is compared with and in what it is divided by; the
loss that uses the result is in `losses`.

Notation: N calls. `values_N` is what credit assignment gave each call, `rollouts_N` the index of the rollout that
made it, and `groups_N` the index of the baseline group in which it is compared.
The score s of a rollout in a group is the mean value of its calls there. All statistics are taken over the S scores
and never over calls, so a rollout counts once, however often its agent calls the model.

    grpo                  (s - mean_g) / (std_g + eps)     Shao et al. 2024, arXiv 2402.03300, section 4.1.2
    dr_grpo               s - mean_g                       Liu et al. 2025, arXiv 2503.20783, section 3.2
    rloo                  s - mean of the others in g      Ahmadian et al. 2024, arXiv 2402.14740
    reinforce++           (s - mean) / std                 Hu et al. 2025, arXiv 2501.03262: over the batch
    reinforce++-baseline  (s - mean_g) / std               the same paper: mean of the group, deviation of the batch

The advantage of a call is that of its rollout's score, plus the distance of its own value from the score. The
distance is scaled like the score itself: by 1 / (std_g + eps), 1, 1, 1 / std and 1 / std.

Deviations from the papers, and why:
- Standard deviations are unbiased (divide by n - 1), as in the public implementations.
- REINFORCE++ whitens over tokens. Here it whitens over rollouts, or long answers would count more.
- A group of one rollout has nothing to compare with, so its advantages are 0. For `reinforce++` that is a batch of
  one.
- Scores that differ only by rounding count as equal; a division by their deviation would turn rounding into signal.
  Where an estimator divides, the calls of equal rollouts get 0 as well, because there is no unit to measure the
  distance of a call from its score.

Sums are taken in the order of VERL's `core_algos`, so that both libraries give the same numbers to the last bit.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from agl.errors import ConfigError
from agl_algo_torch.typed_torch import integers, unique

Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++-baseline"]
ESTIMATORS: tuple[str, ...] = get_args(Estimator)

ROUNDING = 1e-6
"""Scores of a group closer than this, relative to its largest (at least 1), are equal."""

WHITEN = 1e-8
"""Added to the count and to the variance when scores are whitened, as VERL does."""


def estimate(
    values_N: Tensor, *, rollouts_N: Tensor, groups_N: Tensor, estimator: Estimator = "grpo", eps: float = 1e-6
) -> Tensor:
    """Return the advantage of every call, [N], in the dtype of `values_N`.

    Indices need not be dense. No calls give no advantages. Raises ConfigError for an unknown estimator.
    """
    if estimator not in ESTIMATORS:
        raise ConfigError(f"The advantage estimator {estimator!r} is unknown. Use one of: {', '.join(ESTIMATORS)}.")
    if values_N.numel() == 0:
        return values_N
    scores_S, group_S, score_of_N = _scores(values_N, rollouts_N=rollouts_N, groups_N=groups_N)
    if estimator == "reinforce++":
        # The whole batch is one group here: rollouts of different tasks are compared with each other.
        found_S, unit_S = _whitened(scores_S, differs_S=_differs(scores_S, torch.zeros_like(group_S)))
    elif estimator == "reinforce++-baseline":
        found_S, unit_S = _centred(scores_S, group_S)
    else:
        found_S, unit_S = _grouped(scores_S, group_S, estimator=estimator, eps=eps)
    # A_call = A_score + (value - s) * unit.  [N]
    # Credit that is the same for all calls of a rollout makes the second term 0: every call gets A_score.
    return found_S[score_of_N] + (values_N - scores_S[score_of_N]) * unit_S[score_of_N]


def _scores(values_N: Tensor, *, rollouts_N: Tensor, groups_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean value per (group, rollout) [S], the dense group of each [S] and the score of each call [N]."""
    # A rollout has one score per group that its calls are compared in: agents may have baselines of their own.
    pairs_N2 = torch.stack([groups_N, rollouts_N], dim=1)  # [N, 2]
    pairs_S2, score_of_N = unique(pairs_N2, dim=0)  # [S, 2], [N]
    _, group_S = unique(pairs_S2[:, 0])  # [S], 0 to number of groups - 1
    count_S = torch.bincount(score_of_N, minlength=len(pairs_S2))  # [S] calls per score, at least 1
    total_S = values_N.new_zeros(len(pairs_S2)).index_add(0, score_of_N, values_N)  # [S]
    return total_S / count_S, group_S, score_of_N


def _grouped(
    scores_S: Tensor, group_S: Tensor, *, estimator: Literal["grpo", "dr_grpo", "rloo"], eps: float
) -> tuple[Tensor, Tensor]:
    """Return the advantage of every score within its group and the unit of distances from it, both [S]."""
    found_S, unit_S = torch.zeros_like(scores_S), torch.zeros_like(scores_S)
    differs_S = _differs(scores_S, group_S)
    for own_S in _members(group_S):
        own, n = scores_S[own_S], int(own_S.sum())  # [n], the paper's r_1 ... r_G
        if n == 1:
            continue  # nothing to compare with, and std of one number is not defined: stays 0
        mean, does_differ = own.mean(), differs_S[own_S]
        if estimator == "grpo":
            scale = own.std() + eps  # eps bounds the advantage of groups that hardly differ
            found_S[own_S] = (own - mean) / scale * does_differ
            unit_S[own_S] = 1.0 / scale * does_differ
            continue
        # dr_grpo: s - mean. Dividing by std would give easy and hard tasks, where std is small, more weight.
        # rloo: the mean of the others is (n * mean - s) / (n - 1), so s - that = (s - mean) * n / (n - 1).
        away = own - mean if estimator == "dr_grpo" else own * n / (n - 1) - mean * n / (n - 1)
        found_S[own_S] = away * does_differ
        unit_S[own_S] = 1.0  # nothing is divided, so the distance of a call counts as it is
    return found_S, unit_S


def _centred(scores_S: Tensor, group_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores less the mean of their group, whitened over the batch; groups of one stay out of it."""
    # A group of one is exactly 0 after centring. Counting it would shrink the deviation of all others.
    counted_S = torch.bincount(group_S)[group_S] > 1  # [S] bool
    away_S = torch.zeros_like(scores_S)
    for own_S in _members(group_S):
        away_S[own_S] = scores_S[own_S] - scores_S[own_S].mean()
    differs_S = _differs(scores_S, group_S)
    found_S, unit_S = torch.zeros_like(scores_S), torch.zeros_like(scores_S)
    found_S[counted_S], unit_S[counted_S] = _whitened(away_S[counted_S], differs_S=differs_S[counted_S])
    return found_S, unit_S


def _whitened(scores_S: Tensor, *, differs_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores with mean 0 and deviation 1, 0 where they do not differ, and the unit of distances, both [S]."""
    if not bool(differs_S.any()):
        return torch.zeros_like(scores_S), torch.zeros_like(scores_S)
    n = len(scores_S)  # at least 2, for one score alone does not differ
    mean = scores_S.sum() / (n + WHITEN)
    # var = sum (s - mean)^2 / (n - 1), written as the biased variance times n / (n - 1) to match VERL bit for bit.
    variance = ((scores_S - mean) ** 2).sum() / (n + WHITEN) * (n / (n - 1))
    scale = torch.rsqrt(variance + WHITEN)  # 1 / std
    return (scores_S - mean) * scale * differs_S, torch.full_like(scores_S, float(scale))


def _differs(scores_S: Tensor, group_S: Tensor) -> Tensor:
    """Return for every score if those of its group differ by more than rounding, [S] bool."""
    differs_S = torch.zeros(len(scores_S), dtype=torch.bool)
    for own_S in _members(group_S):
        own = scores_S[own_S]
        # Relative to the group's largest score: sums of floats are off by about their size times 1e-16 (or 1e-7).
        differs_S[own_S] = bool(own.max() - own.min() > ROUNDING * max(1.0, float(own.abs().max())))
    return differs_S


def _members(group_S: Tensor) -> list[Tensor]:
    """Return for each group the scores that belong to it, [S] bool each."""
    return [group_S == group for group in dict.fromkeys(integers(group_S))]
