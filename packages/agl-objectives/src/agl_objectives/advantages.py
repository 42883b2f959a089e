"""Turns the values of calls into advantages: scores per rollout, an estimator over them, and back to calls.

Notation: N calls. `values_N` is what credit assignment gave each call, `rollouts_N` the index of the rollout that
made it, and `groups_N` the index of the baseline group in which it is compared.
The score s of a rollout in a group is the mean value of its calls there. All statistics are taken over the S scores
and never over calls, so a rollout counts once, however often its agent calls the model.
The formulas are in `estimators` and in plugins.
`call_advantages` does the same for what credit assignment returned, by span id.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from agl_objectives.contract import Scores
from agl_objectives.typed_torch import floats, unique

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from agl.schemas import CallCredit
    from agl_objectives.contract import Estimator
    from agl_objectives.groups import Baseline

__all__ = ["call_advantages", "estimate"]


def call_advantages(
    credits: Sequence[Sequence[CallCredit]],
    *,
    groups: Sequence[int],
    tokens: Mapping[str, int],
    estimator: Estimator,
    baselines: Sequence[Baseline] | None = None,
) -> list[dict[str, float]]:
    """Return advantages by span id for every rollout.

    `credits` is what credit gave the calls of each rollout, `groups` the task of each, and `tokens` counts those of a
    call by span id. A call whose credit says `is_advantage` keeps its value and takes no part in the statistics.
    `baselines` are what the greedy rollout of each rollout's task got, for estimators that subtract it.
    """
    # Finished advantages (hierarchical and counterfactual credit) pass through; normalising them again would undo them.
    result: list[dict[str, float]] = [{c.span_id: c.value for c in calls if c.is_advantage} for calls in credits]
    open_calls = [(index, call) for index, calls in enumerate(credits) for call in calls if not call.is_advantage]
    # Calls are compared when they share both the task and the credit's baseline key: a key such as "writer" of one
    # task must not meet that of another.
    keys: dict[tuple[int, str], int] = {}
    for index, call in open_calls:
        keys.setdefault((groups[index], call.baseline), len(keys))
    # float64: a group's deviation is a small difference of rewards.
    advantages_N = estimate(
        torch.tensor([call.value for _, call in open_calls], dtype=torch.float64),
        rollouts_N=torch.tensor([index for index, _ in open_calls], dtype=torch.int64),
        groups_N=torch.tensor([keys[groups[index], call.baseline] for index, call in open_calls], dtype=torch.int64),
        estimator=estimator,
        tokens_N=torch.tensor([tokens.get(call.span_id, 0) for _, call in open_calls], dtype=torch.int64),
        baseline_N=None
        if baselines is None
        else torch.tensor([baselines[index].of(call.baseline) for index, call in open_calls], dtype=torch.float64),
    )
    for (index, call), advantage in zip(open_calls, floats(advantages_N), strict=True):
        result[index][call.span_id] = advantage
    return result


def estimate(
    values_N: Tensor,
    *,
    rollouts_N: Tensor,
    groups_N: Tensor,
    estimator: Estimator,
    tokens_N: Tensor | None = None,
    baseline_N: Tensor | None = None,
) -> Tensor:
    """Return the advantage of every call, [N], in the dtype of `values_N`.

    Indices need not be dense. `tokens_N` are the trained tokens of each call, 1 when absent, and `baseline_N` what it
    is compared with, the same for all calls of a score. No calls give no advantages.
    """
    if values_N.numel() == 0:
        return values_N
    scores, score_of_N = _scores(
        values_N,
        rollouts_N=rollouts_N,
        groups_N=groups_N,
        tokens_N=torch.ones_like(rollouts_N) if tokens_N is None else tokens_N,
    )
    if baseline_N is not None:
        baseline_S = torch.zeros_like(scores.scores_S)
        baseline_S[score_of_N] = baseline_N
        scores = replace(scores, baseline_S=baseline_S)
    found = estimator(scores)
    # A_call = A_score + (value - s) * unit.  [N]
    # Credit that is the same for all calls of a rollout makes the second term 0: every call gets A_score.
    away_N = values_N - scores.scores_S[score_of_N]
    return found.found_S[score_of_N] + away_N * found.unit_S[score_of_N]


def _scores(values_N: Tensor, *, rollouts_N: Tensor, groups_N: Tensor, tokens_N: Tensor) -> tuple[Scores, Tensor]:
    """Return the mean value per (group, rollout) with its group and tokens, and the score of each call, [N]."""
    # A rollout has one score per group that its calls are compared in: agents may have baselines of their own.
    pairs_N2 = torch.stack([groups_N, rollouts_N], dim=1)  # [N, 2]
    pairs_S2, score_of_N = unique(pairs_N2, dim=0)  # [S, 2], [N]
    _, group_S = unique(pairs_S2[:, 0])  # [S], 0 to number of groups - 1
    count_S = torch.bincount(score_of_N, minlength=len(pairs_S2))  # [S] calls per score, at least 1
    total_S = values_N.new_zeros(len(pairs_S2)).index_add(0, score_of_N, values_N)  # [S]
    tokens_S = tokens_N.new_zeros(len(pairs_S2)).index_add(0, score_of_N, tokens_N)  # [S]
    return Scores(scores_S=total_S / count_S, group_S=group_S, tokens_S=tokens_S), score_of_N
