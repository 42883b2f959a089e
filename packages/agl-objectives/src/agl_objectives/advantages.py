"""Turns the credit of calls into advantages, by an estimator on tensors; the formulas are in `estimators` and plugins.

The grouping into scores is that of `comparison`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from agl_objectives.comparison import compare_calls
from agl_objectives.contract import Scores
from agl_objectives.typed_torch import floats

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agl.schemas import CallCredit
    from agl_objectives.comparison import Score
    from agl_objectives.contract import Estimator
    from agl_objectives.groups import Baseline

__all__ = ["call_advantages"]


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

    def estimate(scores: Sequence[Score]) -> tuple[list[float], list[float]]:
        counts = [sum(tokens.get(call.span_id, 0) for call in score.calls) for score in scores]
        roles = tuple(score.calls[0].role for score in scores)
        greedy = None if baselines is None else [baselines[s.rollout].of(s.calls[0].baseline) for s in scores]
        found = estimator(
            Scores(
                # float64: a group's deviation is a small difference of rewards.
                scores_S=torch.tensor([score.value for score in scores], dtype=torch.float64),
                group_S=torch.tensor([score.group for score in scores]),
                tokens_S=torch.tensor(counts),
                baseline_S=None if greedy is None else torch.tensor(greedy, dtype=torch.float64),
                roles_S=roles if any(roles) else (),
            )
        )
        return floats(found.found_S), floats(found.unit_S)

    return compare_calls(credits, groups=groups, estimate=estimate)
