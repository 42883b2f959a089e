"""Advantage estimators over calls, as pure functions of tensors, so that any of them can be checked by hand.

Notation: N calls; `values_N` what credit assignment gave each call; `rollouts_N` and `groups_N` the indices of
the rollout that made the call and of the baseline group that it is compared in.
A rollout's score in a group is the mean of its calls' values there, and every statistic below is taken over
scores: a rollout counts once, however often its agent calls the model.

    grpo                  (v - mean_g) / (std_g + eps)     Shao et al. 2024, arXiv 2402.03300, section 4.1.1
    dr_grpo               v - mean_g                       Liu et al. 2025, arXiv 2503.20783, section 3.2
    rloo                  v - mean of the others in g      Ahmadian et al. 2024, arXiv 2402.14740, equation 9
    reinforce++           (v - mean) / (std + eps)         Hu 2025, arXiv 2501.03262: over the batch
    reinforce++-baseline  (v - mean_g) / (std + eps)       the same paper: group mean, batch deviation

Deviations: standard deviations are unbiased (divide by n - 1), as in the public implementations.
REINFORCE++ whitens over tokens in the paper; here over rollouts, or long answers would count more.
A group with one rollout has nothing to compare with: its advantages are 0 (for `reinforce++`, a batch of one).
Values that differ only by rounding count as equal, so that dividing by their deviation makes no noise.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from agl.errors import ConfigError
from agl_algo_torch.typed import unique

Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++-baseline"]
ESTIMATORS: tuple[str, ...] = get_args(Estimator)

ROUNDING = 1e-6
"""Deviations below this, relative to the largest score (at least 1), are rounding."""


def estimate(
    values_N: Tensor, *, rollouts_N: Tensor, groups_N: Tensor, estimator: Estimator = "grpo", eps: float = 1e-6
) -> Tensor:
    """Return the advantage of every call, [N], in the dtype of `values_N`.

    Indices need not be dense. Raises ConfigError for an unknown estimator.
    """
    if estimator not in ESTIMATORS:
        raise ConfigError(f"The advantage estimator {estimator!r} is unknown. Use one of: {', '.join(ESTIMATORS)}.")
    if values_N.numel() == 0:
        return values_N
    scores_S, group_S, score_of_N = _scores(values_N, rollouts_N=rollouts_N, groups_N=groups_N)
    if estimator == "reinforce++":
        mean, std = _batch_statistics(scores_S)
        return (values_N - mean) / (std + eps) if _varies(std, scores_S) else torch.zeros_like(values_N)
    count_G, mean_G = _group_means(scores_S, group_S)
    group_N = group_S[score_of_N]
    if estimator == "rloo":
        total_N = mean_G[group_N] * count_G[group_N]
        others_N = (total_N - scores_S[score_of_N]) / (count_G[group_N] - 1).clamp(min=1)
        advantages_N = values_N - others_N
    else:
        advantages_N = values_N - mean_G[group_N]
    advantages_N = torch.where(count_G[group_N] > 1, advantages_N, torch.zeros_like(advantages_N))
    if estimator == "grpo":
        std_G = _group_deviations(scores_S, group_S, mean_G, count_G)
        return _without_rounding(advantages_N, scores_S) / (std_G[group_N] + eps)
    if estimator == "reinforce++-baseline":
        _, std = _batch_statistics(scores_S - mean_G[group_S])
        return _without_rounding(advantages_N, scores_S) / (std + eps)
    return _without_rounding(advantages_N, scores_S)


def _scores(values_N: Tensor, *, rollouts_N: Tensor, groups_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean value per (group, rollout): scores [S], the dense group of each [S], and the score of each call [N]."""
    pairs_N2 = torch.stack([groups_N, rollouts_N], dim=1)
    pairs_S2, score_of_N = unique(pairs_N2, dim=0)
    _, group_S = unique(pairs_S2[:, 0])
    count_S = torch.bincount(score_of_N, minlength=len(pairs_S2))
    total_S = values_N.new_zeros(len(pairs_S2)).index_add(0, score_of_N, values_N)
    return total_S / count_S, group_S, score_of_N


def _group_means(scores_S: Tensor, group_S: Tensor) -> tuple[Tensor, Tensor]:
    count_G = torch.bincount(group_S).to(scores_S.dtype)
    return count_G, scores_S.new_zeros(len(count_G)).index_add(0, group_S, scores_S) / count_G


def _group_deviations(scores_S: Tensor, group_S: Tensor, mean_G: Tensor, count_G: Tensor) -> Tensor:
    square_S = (scores_S - mean_G[group_S]) ** 2
    total_G = scores_S.new_zeros(len(mean_G)).index_add(0, group_S, square_S)
    return (total_G / (count_G - 1).clamp(min=1)).sqrt()


def _batch_statistics(scores_S: Tensor) -> tuple[Tensor, Tensor]:
    mean = scores_S.mean()
    spread = ((scores_S - mean) ** 2).sum() / max(len(scores_S) - 1, 1)
    return mean, spread.sqrt()


def _varies(deviation: Tensor, scores_S: Tensor) -> bool:
    return bool(deviation > ROUNDING * max(1.0, float(scores_S.abs().max())))


def _without_rounding(advantages_N: Tensor, scores_S: Tensor) -> Tensor:
    limit = ROUNDING * max(1.0, float(scores_S.abs().max()))
    return torch.where(advantages_N.abs() > limit, advantages_N, torch.zeros_like(advantages_N))
