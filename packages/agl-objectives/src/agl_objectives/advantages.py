"""Turns the values of calls into advantages, by an estimator over the scores of rollouts.

Notation: there are N calls. `values_N` has the credit of each call, `rollouts_N` the index of the call's rollout, and
`groups_N` the index of the baseline group in which the call is compared.
The score s of a rollout in a group is the mean value of the rollout's calls in that group. All statistics are taken
over the S scores and never over calls, so a rollout counts once, however often its agent calls the model.
The formulas are in `estimators` and in plugins.
`estimate` works on tensors, `call_advantages` on the results of credit assignment, by span id.
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
    """Return the advantages of the calls of every rollout, by span id.

    A call whose credit says `is_advantage` keeps its value and does not count in the statistics.

    Args:
        credits: The credits of the calls of each rollout.
        groups: Number of the group of each rollout.
        tokens: Number of trained tokens of each call, by span id.
        estimator: The estimator.
        baselines: The baseline of each rollout, from the greedy rollout of the same task; None without greedy rollouts.
    """
    # Finished advantages (hierarchical and counterfactual credit) stay as they are: they have a baseline already.
    result: list[dict[str, float]] = [{c.span_id: c.value for c in calls if c.is_advantage} for calls in credits]
    open_calls = [(index, call) for index, calls in enumerate(credits) for call in calls if not call.is_advantage]
    # Calls are compared if they share both the group and the credit's baseline key: calls of a "writer" must not be
    # compared with those of a "writer" in another task.
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
    """Return the advantage of every call, [N], in the dtype of `values_N`; empty for no calls.

    Args:
        values_N: Credit of each call.
        rollouts_N: Number of the call's rollout; numbers need not be consecutive.
        groups_N: Number of the call's baseline group; numbers need not be consecutive.
        estimator: The estimator.
        tokens_N: Trained tokens of each call; None counts 1 for each.
        baseline_N: Score of the greedy rollout that the call is compared with, equal for all calls of a score.
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
    # If all calls of a rollout have the same credit, the second term is 0, and every call gets A_score.
    away_N = values_N - scores.scores_S[score_of_N]
    return found.found_S[score_of_N] + away_N * found.unit_S[score_of_N]


def _scores(values_N: Tensor, *, rollouts_N: Tensor, groups_N: Tensor, tokens_N: Tensor) -> tuple[Scores, Tensor]:
    """Return one score per pair of group and rollout, and for each call the index of its score, [N]."""
    # A rollout has one score in every group with calls of it, because agents may have separate baselines.
    pairs_N2 = torch.stack([groups_N, rollouts_N], dim=1)  # [N, 2]
    pairs_S2, score_of_N = unique(pairs_N2, dim=0)  # [S, 2], [N]
    _, group_S = unique(pairs_S2[:, 0])  # [S], 0 to number of groups - 1
    count_S = torch.bincount(score_of_N, minlength=len(pairs_S2))  # [S] calls per score, at least 1
    total_S = values_N.new_zeros(len(pairs_S2)).index_add(0, score_of_N, values_N)  # [S]
    tokens_S = tokens_N.new_zeros(len(pairs_S2)).index_add(0, score_of_N, tokens_N)  # [S]
    return Scores(scores_S=total_S / count_S, group_S=group_S, tokens_S=tokens_S), score_of_N
