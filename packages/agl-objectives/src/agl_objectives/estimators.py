"""The estimators of this distribution: pure functions of scores.

They differ in the baseline of a rollout's score s and in the divisor. There are S scores in all, and the scores of a
group g are those of one task.

    grpo                  (s - mean_g) / (std_g + eps)     Shao et al. 2024, arXiv 2402.03300, section 4.1.2
    dr_grpo               s - mean_g                       Liu et al. 2025, arXiv 2503.20783, section 3.2
    rloo                  s - mean of the others in g      Ahmadian et al. 2024, arXiv 2402.14740
    opo                   s - sum_g(l s) / sum_g(l)        Hao et al. 2025, arXiv 2505.23585; l = tokens
    gpg                   (S / S_nonzero) (s - mean_g)     Chu et al. 2025, arXiv 2504.02546; S over the batch
    grpo_passk            (s - second_g) / (std_g + eps)   for the best of g, 0 for the others: arXiv 2503.19595
    remax                 s - score of a greedy rollout    Li et al. 2023, arXiv 2310.10505
    reinforce++           (s - mean) / std                 Hu et al. 2025, arXiv 2501.03262: over the batch
    reinforce++-baseline  (s - mean_g) / std               the same paper: mean of the group, deviation of the batch
    max_rl                (s - mean_g) / mean_g            Tajwar et al. 2026, arXiv 2602.02710
    rae                   s - mean of the role             Liu et al. 2025, arXiv 2506.24119 (SPIRAL): over the batch
    hierarchical_grpo     s - mean_g, or 0 for the solver  without a paper; see the function

The advantage of a call is the advantage of its rollout's score, plus the distance of the call's value from the score
(see `comparison`). The distance is scaled like the score: by 1 / (std_g + eps), 1, S / S_nonzero, 1 / std or
1 / mean_g.

Deviations from the papers, and why:
- Standard deviations are unbiased (divide by n - 1), as in the public implementations.
- REINFORCE++ whitens over tokens. Here it whitens over rollouts, because otherwise long answers would count more.
- A single rollout in a group has no others to be compared with, so its advantages are 0. For `reinforce++` this holds
  for a single rollout in the batch. It does not hold for `remax`, which compares with a greedy rollout.
- Scores that differ only by rounding count as equal, because a division by their deviation would turn rounding into
  signal. If an estimator divides by the deviation, all calls of equal rollouts get 0, because the distance of a call
  from its score cannot be scaled.
- MaxRL is for rewards of 0 and 1. `max_rl` divides by the mean of |s|, which is the same for them; with negative
  rewards the division by their mean could turn the sign of an advantage.
- SPIRAL's baseline is an average over earlier rollouts of the role, in which a rollout counts 0.95 times as much as the
  next. `rae` takes the mean over the role's rollouts of this step: an estimator has no state, which a restart would
  lose, and rollouts of this step are those of the policy in training.

Sums are in the order of VERL's `core_algos`, so that both libraries give the same numbers to the last bit.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from agl.errors import ConfigError
from agl_objectives.comparison import differ, relative
from agl_objectives.contract import Estimates, Scores
from agl_objectives.entries import estimator
from agl_objectives.typed_torch import integers

if TYPE_CHECKING:
    from torch import Tensor

    from agl_objectives.comparison import Rule

WHITEN = 1e-8
"""Small constant that whitening adds to the number of scores and to their variance, as in VERL."""


@estimator("grpo")
def grpo(scores: Scores, *, eps: float = 1e-6) -> Estimates:
    """Return `(s - mean_g) / (std_g + eps)`."""
    return _relative("grpo", scores, eps=eps)


@estimator("dr_grpo")
def dr_grpo(scores: Scores) -> Estimates:
    """Return `s - mean_g`. Division by std_g would give more weight to easy and hard tasks, whose std_g is small."""
    return _relative("dr_grpo", scores)


@estimator("rloo")
def rloo(scores: Scores) -> Estimates:
    """Return `s - mean of the others in g`."""
    return _relative("rloo", scores)


def _relative(rule: Rule, scores: Scores, *, eps: float = 0.0) -> Estimates:
    found_S, unit_S = torch.zeros_like(scores.scores_S), torch.zeros_like(scores.scores_S)
    for own_S, own in _compared(scores):
        found_S[own_S], unit_S[own_S] = relative(
            rule, own, size=len(own), mean=own.mean(), deviation=own.std(), differs=_differ(own), eps=eps
        )
    return Estimates(found_S=found_S, unit_S=unit_S)


@estimator("opo")
def opo(scores: Scores) -> Estimates:
    """Return `s - sum_g(l s) / sum_g(l)`: the baseline of least variance if gradients grow with the token counts l."""
    found_S, unit_S = torch.zeros_like(scores.scores_S), torch.zeros_like(scores.scores_S)
    for own_S, own in _compared(scores):
        # argmin_b Var[(s - b) grad log pi] is E[|grad|^2 s] / E[|grad|^2]; with |grad|^2 proportional to the length l
        # it is the mean of s weighted by l.
        tokens = scores.tokens_S[own_S].to(own.dtype)  # l, [n]
        found_S[own_S] = (own - (tokens * own).sum() / tokens.sum().clamp(min=1)) * _differ(own)
        unit_S[own_S] = 1.0
    return Estimates(found_S=found_S, unit_S=unit_S)


@estimator("gpg")
def gpg(scores: Scores) -> Estimates:
    """Return `(S / S_nonzero) (s - mean_g)`: the fewer scores differ from 0, the larger the advantages are."""
    found = dr_grpo(scores)
    # alpha = S / number of scores that are not 0, over the batch.
    share = len(scores.scores_S) / max(1, int(torch.count_nonzero(scores.scores_S)))
    return Estimates(found_S=share * found.found_S, unit_S=share * found.unit_S)


@estimator("grpo_passk")
def grpo_passk(scores: Scores, *, eps: float = 1e-6) -> Estimates:
    """Return `(s - second_g) / (std_g + eps)` for the best score of a group, and 0 for the others, as pass@k does."""
    found_S, unit_S = torch.zeros_like(scores.scores_S), torch.zeros_like(scores.scores_S)
    for own_S, own in _compared(scores):
        if not _differ(own):
            continue
        # max over the group counts under pass@k: without the best answer it would have been the second, so their
        # distance is what the best one adds.
        (best, second), (place, _) = torch.topk(own, 2)
        winner = own_S.nonzero()[place, 0]
        scale = own.std() + eps
        found_S[winner] = (best - second) / scale  # 0 if two scores are best; the unit is then 0 too
        unit_S[winner] = (best > second) / scale
    return Estimates(found_S=found_S, unit_S=unit_S)


@estimator("remax", needs_baseline=True)
def remax(scores: Scores) -> Estimates:
    """Return `s - b`, where b is the score of a greedy rollout of the task; raises ConfigError without `baseline_S`."""
    if scores.baseline_S is None:
        raise ConfigError(
            "The estimator remax subtracts the reward of a greedy rollout of every task, and none was made. Use an "
            "algorithm that makes them, or rloo, whose baseline is the mean of the other rollouts of the task."
        )
    # b depends on the task and not on the sampled answer, so E[b grad log pi] = 0 and the gradient stays unbiased.
    return Estimates(found_S=scores.scores_S - scores.baseline_S, unit_S=torch.ones_like(scores.scores_S))


@estimator("reinforce++", compares="batch")
def reinforce_plus_plus(scores: Scores) -> Estimates:
    """Return `(s - mean) / std` over the batch: rollouts of different tasks are compared with each other."""
    # One baseline and one scale for all rollouts: a task that always fails gets negative advantages.
    differs_S = torch.full_like(scores.group_S, _differ(scores.scores_S), dtype=torch.bool)
    return _whitened(scores.scores_S, differs_S=differs_S)


@estimator("reinforce++-baseline")
def reinforce_plus_plus_baseline(scores: Scores) -> Estimates:
    """Return `(s - mean_g) / std` with std over the batch; groups of one rollout get 0 and do not count in std."""
    # A group of one rollout is exactly 0 after centring, so counting it would lower the deviation of the batch.
    counted_S = torch.bincount(scores.group_S)[scores.group_S] > 1  # [S] bool
    away_S, differs_S = torch.zeros_like(scores.scores_S), torch.zeros_like(counted_S)
    for own_S, own in _compared(scores):
        # The mean of the group removes how hard the task is; the deviation of the batch sets one scale for all tasks.
        away_S[own_S], differs_S[own_S] = own - own.mean(), _differ(own)
    found_S, unit_S = torch.zeros_like(away_S), torch.zeros_like(away_S)
    whitened = _whitened(away_S[counted_S], differs_S=differs_S[counted_S])
    found_S[counted_S], unit_S[counted_S] = whitened.found_S, whitened.unit_S
    return Estimates(found_S=found_S, unit_S=unit_S)


@estimator("max_rl")
def max_rl(scores: Scores) -> Estimates:
    """Return `(s - mean_g) / mean_g`, which follows the gradient of log p in place of that of p, the success rate."""
    # grad log p = (grad p) / p: a task counts the more, the more seldom it succeeds. With n rollouts the expectation is
    # the gradient of -sum_{k=1..n-1} (1 - p)^k / k, the first terms of log p; the baseline takes away the n-th.
    found_S, unit_S = torch.zeros_like(scores.scores_S), torch.zeros_like(scores.scores_S)
    for own_S, own in _compared(scores):
        mean = own.abs().mean()
        if mean > 0:  # without a success nothing is known of log p
            found_S[own_S], unit_S[own_S] = (own - own.mean()) / mean * _differ(own), 1.0 / mean
    return Estimates(found_S=found_S, unit_S=unit_S)


@estimator("rae", compares="batch")
def rae(scores: Scores) -> Estimates:
    """Return `s - mean of the role` over the batch. Without roles in the credit, all scores have one role."""
    # In a game without draws the mean of all players is the same whatever they do, and the advantage of the one who
    # moves first would be learnt as if it were skill. A mean per role removes both.
    names = scores.roles_S or ("",) * len(scores.scores_S)
    number = {name: place for place, name in enumerate(dict.fromkeys(names))}
    role_S = torch.tensor([number[name] for name in names], dtype=torch.int64)
    found = dr_grpo(replace(scores, group_S=role_S))
    return Estimates(found_S=found.found_S, unit_S=torch.ones_like(found.found_S))


@estimator("hierarchical_grpo")
def hierarchical_grpo(scores: Scores, *, within: str = "solver") -> Estimates:
    """Return `s - mean_g`, and 0 for roles that are compared within a rollout; raises ConfigError without roles.

    For a proposer that invents a problem, and a solver that tries it several times, all in one rollout. The problems of
    two rollouts differ, so an attempt is compared with the other attempts of its rollout, and only the proposals with
    those of other rollouts. An attempt gets `v - s`, the distance of its credit from the mean over the role's calls.

    Args:
        scores: The scores.
        within: Regular expression that matches the whole names of the roles that are compared within a rollout.
    """
    if not scores.roles_S:
        raise ConfigError(
            'The estimator hierarchical_grpo compares roles, and the credit names none; set [credit] use = "role".'
        )
    found = dr_grpo(scores)
    is_within = [re.fullmatch(within, role) is not None for role in scores.roles_S]
    outside_S = ~torch.tensor(is_within, dtype=torch.bool)
    return Estimates(found_S=found.found_S * outside_S, unit_S=torch.ones_like(found.unit_S))


def _whitened(scores_S: Tensor, *, differs_S: Tensor) -> Estimates:
    """Return estimates that scale scores to mean 0 and deviation 1; the advantage is 0 where `differs_S` is false."""
    if not bool(differs_S.any()):
        return Estimates(found_S=torch.zeros_like(scores_S), unit_S=torch.zeros_like(scores_S))
    n = len(scores_S)  # at least 2, because a single score does not differ
    mean = scores_S.sum() / (n + WHITEN)
    # var = sum (s - mean)^2 / (n - 1), written as the biased variance times n / (n - 1) to match VERL bit for bit.
    variance = ((scores_S - mean) ** 2).sum() / (n + WHITEN) * (n / (n - 1))
    scale = torch.rsqrt(variance + WHITEN)  # 1 / std
    return Estimates(found_S=(scores_S - mean) * scale * differs_S, unit_S=torch.full_like(scores_S, float(scale)))


def _differ(own: Tensor) -> bool:
    return differ(float(own.min()), float(own.max()))


def _compared(scores: Scores) -> list[tuple[Tensor, Tensor]]:
    """Return for each group of at least two scores the mask of the group's scores, [S] bool, and these scores."""
    groups = [scores.group_S == group for group in dict.fromkeys(integers(scores.group_S))]
    return [(own_S, scores.scores_S[own_S]) for own_S in groups if int(own_S.sum()) > 1]
