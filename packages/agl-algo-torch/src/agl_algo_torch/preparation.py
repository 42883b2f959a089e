"""From finished episodes to samples: credit, then advantages over rollouts, then rows with masks.

Credit assignment says what each call is worth and whom it is compared with; the estimator turns that into
advantages over the whole batch, because some estimators scale by the batch's deviation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from agl_algo_torch.advantages import Estimator, estimate
from agl_algo_torch.batch import RowSample, from_row
from agl_algo_torch.typed_torch import numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agl.contracts import Credit
    from agl.schemas import CallCredit, Episode


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBatch:
    """The rows of a batch in the order of its episodes, rows of one rollout contiguous, and what to log."""

    samples: list[RowSample]
    metrics: dict[str, float]


def prepare(groups: Sequence[Sequence[Episode]], *, credit: Credit, estimator: Estimator) -> PreparedBatch:
    """Return samples with advantages for groups of episodes that share a task.

    A call whose credit says `is_advantage` keeps its value. Rows without a creditable call are left out.
    """
    episodes = [episode for group in groups for episode in group]
    credits = [list(calls) for group in groups for calls in credit.assign(group)]
    places = [index for index, group in enumerate(groups) for _ in group]
    advantages = _advantages(credits, places=places, estimator=estimator)
    samples: list[RowSample] = []
    for episode, by_span in zip(episodes, advantages, strict=True):
        temperatures = {call.span_id: call.temperature for call in episode.transitions}
        rows = [from_row(row, advantages=by_span, temperatures=temperatures) for row in episode.rows]
        samples += [row for row in rows if row.trained_tokens]
    return PreparedBatch(samples=samples, metrics=_metrics(groups, samples))


def _advantages(
    credits: Sequence[Sequence[CallCredit]], *, places: Sequence[int], estimator: Estimator
) -> list[dict[str, float]]:
    """Advantages by span id for every episode; `places` is the group of each episode."""
    result: list[dict[str, float]] = [{c.span_id: c.value for c in calls if c.is_advantage} for calls in credits]
    open_calls = [(index, call) for index, calls in enumerate(credits) for call in calls if not call.is_advantage]
    keys: dict[tuple[int, str], int] = {}
    for index, call in open_calls:
        keys.setdefault((places[index], call.baseline), len(keys))
    advantages_N = estimate(
        torch.tensor([call.value for _, call in open_calls], dtype=torch.float64),
        rollouts_N=torch.tensor([index for index, _ in open_calls], dtype=torch.int64),
        groups_N=torch.tensor([keys[places[index], call.baseline] for index, call in open_calls], dtype=torch.int64),
        estimator=estimator,
    )
    for (index, call), advantage in zip(open_calls, numbers(advantages_N), strict=True):
        result[index][call.span_id] = advantage
    return result


def _metrics(groups: Sequence[Sequence[Episode]], samples: Sequence[RowSample]) -> dict[str, float]:
    rewards = torch.tensor([e.reward for group in groups for e in group if e.reward is not None], dtype=torch.float64)
    loud = {sample.rollout for sample in samples if not sample.is_silent}
    silent = sum(1 for group in groups if not any(e.rollout.rollout_id in loud for e in group))
    calls = [call for group in groups for e in group for call in e.transitions if not call.reject]
    return {
        "reward": float(rewards.mean()) if len(rewards) else 0.0,
        "reward_std": float(rewards.std()) if len(rewards) > 1 else 0.0,
        "groups": float(len(groups)),
        "groups_silent": float(silent),
        "rollouts": float(sum(len(group) for group in groups)),
        "rows": float(len(samples)),
        "calls_distribution_changed": float(sum(call.is_distribution_changed for call in calls)),
    }
