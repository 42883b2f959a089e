"""Advantage estimators over calls, as pure functions of tensors, so that any of them can be checked by hand.

Notation: N calls; `values_N` what credit assignment gave each call; `rollouts_N` and `groups_N` the indices of
the rollout that made the call and of the baseline group that it is compared in.
A rollout's score s in a group is the mean of its calls' values there, and every statistic below is taken over
scores: a rollout counts once, however often its agent calls the model.

    grpo                  (s - mean_g) / (std_g + eps)     Shao et al. 2024, arXiv 2402.03300, section 4.1.1
    dr_grpo               s - mean_g                       Liu et al. 2025, arXiv 2503.20783, section 3.2
    rloo                  s - mean of the others in g      Ahmadian et al. 2024, arXiv 2402.14740, equation 9
    reinforce++           (s - mean) / std                 Hu 2025, arXiv 2501.03262: over the batch
    reinforce++-baseline  (s - mean_g) / std               the same paper: group mean, batch deviation

A call that was given something else than its rollout's score is as far from the score's advantage as its value is
from the score, in the estimator's unit: 1 / (std_g + eps), 1, 1, 1 / std, 1 / std.

Deviations: standard deviations are unbiased (divide by n - 1), as in the public implementations.
REINFORCE++ whitens over tokens in the paper; here over rollouts, or long answers would count more.
A group with one rollout has nothing to compare with: its advantages are 0 (for `reinforce++`, a batch of one).
Scores that differ only by rounding count as equal, so that dividing by their deviation makes no noise; where an
estimator divides, calls of equal rollouts get 0 as well, for nothing says how much a difference between them is.

Sums are taken in the order of VERL's `core_algos`, whose whitening adds 1e-8 to the count and to the variance, so
that both libraries give the same numbers to the last bit.
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
"""Scores closer than this, relative to the largest (at least 1), are equal."""

WHITEN = 1e-8
"""What whitening adds to the count and to the variance."""


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
        found_S, unit_S = _whitened(scores_S, differs_S=_differs(scores_S, torch.zeros_like(group_S)))
    elif estimator == "reinforce++-baseline":
        found_S, unit_S = _centred(scores_S, group_S)
    else:
        found_S, unit_S = _grouped(scores_S, group_S, estimator=estimator, eps=eps)
    return found_S[score_of_N] + (values_N - scores_S[score_of_N]) * unit_S[score_of_N]


def _scores(values_N: Tensor, *, rollouts_N: Tensor, groups_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean value per (group, rollout): scores [S], the dense group of each [S], and the score of each call [N]."""
    pairs_N2 = torch.stack([groups_N, rollouts_N], dim=1)
    pairs_S2, score_of_N = unique(pairs_N2, dim=0)
    _, group_S = unique(pairs_S2[:, 0])
    count_S = torch.bincount(score_of_N, minlength=len(pairs_S2))
    total_S = values_N.new_zeros(len(pairs_S2)).index_add(0, score_of_N, values_N)
    return total_S / count_S, group_S, score_of_N


def _grouped(
    scores_S: Tensor, group_S: Tensor, *, estimator: Literal["grpo", "dr_grpo", "rloo"], eps: float
) -> tuple[Tensor, Tensor]:
    """The advantage of every score within its group and the unit of distances from it, both [S]."""
    found_S, unit_S = torch.zeros_like(scores_S), torch.zeros_like(scores_S)
    differs_S = _differs(scores_S, group_S)
    for own_S in _members(group_S):
        own, n = scores_S[own_S], int(own_S.sum())
        if n == 1:
            continue
        mean, does_differ = own.mean(), differs_S[own_S]
        if estimator == "grpo":
            scale = own.std() + eps
            found_S[own_S] = (own - mean) / scale * does_differ
            unit_S[own_S] = 1.0 / scale * does_differ
            continue
        away = own - mean if estimator == "dr_grpo" else own * n / (n - 1) - mean * n / (n - 1)
        found_S[own_S] = away * does_differ
        unit_S[own_S] = 1.0
    return found_S, unit_S


def _centred(scores_S: Tensor, group_S: Tensor) -> tuple[Tensor, Tensor]:
    """Scores less the mean of their group, whitened over the batch; groups of one stay out of it."""
    counted_S = torch.bincount(group_S)[group_S] > 1
    away_S = torch.zeros_like(scores_S)
    for own_S in _members(group_S):
        away_S[own_S] = scores_S[own_S] - scores_S[own_S].mean()
    differs_S = _differs(scores_S, group_S)
    found_S, unit_S = torch.zeros_like(scores_S), torch.zeros_like(scores_S)
    found_S[counted_S], unit_S[counted_S] = _whitened(away_S[counted_S], differs_S=differs_S[counted_S])
    return found_S, unit_S


def _whitened(scores_S: Tensor, *, differs_S: Tensor) -> tuple[Tensor, Tensor]:
    """Scores with mean 0 and deviation 1, 0 where they do not differ, and the unit of distances, both [S]."""
    if not bool(differs_S.any()):
        return torch.zeros_like(scores_S), torch.zeros_like(scores_S)
    n = len(scores_S)
    mean = scores_S.sum() / (n + WHITEN)
    variance = ((scores_S - mean) ** 2).sum() / (n + WHITEN) * (n / (n - 1))
    scale = torch.rsqrt(variance + WHITEN)
    return (scores_S - mean) * scale * differs_S, torch.full_like(scores_S, float(scale))


def _differs(scores_S: Tensor, group_S: Tensor) -> Tensor:
    """Whether the scores of each one's group differ by more than rounding; [S] bool."""
    limit = ROUNDING * max(1.0, float(scores_S.abs().max()))
    differs_S = torch.zeros(len(scores_S), dtype=torch.bool)
    for own_S in _members(group_S):
        own = scores_S[own_S]
        differs_S[own_S] = bool(own.max() - own.min() > limit)
    return differs_S


def _members(group_S: Tensor) -> list[Tensor]:
    """Which scores belong to each group; [S] bool each."""
    return [group_S == group for group in dict.fromkeys(integers(group_S))]
