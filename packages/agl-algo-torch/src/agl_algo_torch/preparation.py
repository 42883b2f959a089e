"""Prepares finished episodes for training: credit, then advantages over rollouts, then rows with masks.

Credit assignment says what each call is worth and which calls it is compared with. The estimator turns that into
advantages, over the whole batch at once, because some estimators scale by the batch's deviation.
The formulas are in `agl_objectives`, the tensors in `batch`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from agl_algo_torch.batch import RowSample, from_row
from agl_algo_torch.typed_torch import numbers
from agl_algo_torch.uses import group_uses
from agl_objectives.estimating import estimate

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from agl.contracts import CallUse, Credit
    from agl.schemas import CallCredit, Episode
    from agl_algo_torch.overlong import SoftOverlong
    from agl_objectives.contract import Estimator


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBatch:
    """The rows of a batch in the order of its episodes, those of one rollout side by side, and metrics to log.

    `calls` are those with credit, and `final` those of them whose credit was an advantage already. `uses` are what
    became of every call, by rollout id.
    """

    samples: list[RowSample]
    metrics: dict[str, float]
    calls: int
    final: int
    uses: dict[str, tuple[CallUse, ...]]


def prepare(
    groups: Sequence[Sequence[Episode]],
    *,
    credit: Credit,
    estimator: Estimator,
    mask_truncated: bool = False,
    overlong: SoftOverlong | None = None,
) -> PreparedBatch:
    """Return samples with advantages for groups of episodes that share a task.

    A call whose credit says `is_advantage` keeps its value. Rows without a creditable call are left out. With
    `mask_truncated` calls that were cut at a limit of tokens count in the statistics and are not trained; `overlong`
    takes its punishment off the credit of long ones.
    """
    episodes = [episode for group in groups for episode in group]
    # Credit sees one group at a time: a credit may compare rollouts of one task, and no others.
    credits = [list(calls) for group in groups for calls in credit.assign(group)]
    if overlong is not None and overlong.limit:
        credits = [overlong.applied(episode, calls) for episode, calls in zip(episodes, credits, strict=True)]
    places = [index for index, group in enumerate(groups) for _ in group]  # the group of each episode
    advantages = _advantages(credits, places=places, estimator=estimator, tokens=_tokens(episodes))
    if mask_truncated:
        advantages = [without_truncated(e, by_span) for e, by_span in zip(episodes, advantages, strict=True)]
    samples: list[RowSample] = []
    for episode, by_span in zip(episodes, advantages, strict=True):
        temperatures = {call.span_id: call.temperature for call in episode.transitions}
        # A shared beginning is read in every row and trained in one; a row may have nothing of its own to train.
        rows = [from_row(row, advantages=by_span, temperatures=temperatures) for row in episode.rows]
        samples += [row for row in rows if row.trained_tokens]
    final = sum(call.is_advantage for calls in credits for call in calls)
    given = [{call.span_id: call.value for call in calls} for calls in credits]
    return PreparedBatch(
        samples=samples,
        metrics=_metrics(groups, samples),
        calls=sum(map(len, credits)),
        final=final,
        uses=group_uses(groups, samples, credits=given, advantages=advantages),
    )


def without_truncated(episode: Episode, by_span: Mapping[str, float]) -> dict[str, float]:
    """Return the values of the calls that were not cut at a limit of tokens; `from_row` trains no others.

    Overlong filtering of DAPO (Yu et al. 2025, arXiv 2503.14476, section 3.4). The paper masks the whole sample, which
    is one answer; here that is the call, and the rollout's other calls train.
    """
    cut = {call.span_id for call in episode.transitions if call.is_truncated}
    return {span_id: value for span_id, value in by_span.items() if span_id not in cut}


def rollout_shares(
    groups: Sequence[Sequence[Episode]], *, dropped: Mapping[str, int], loud: Collection[str]
) -> dict[str, float]:
    """Return the shares of rollouts with a cut call, of dropped ones, and of kept ones that train nothing.

    `loud` are the ids of those that have a gradient; `dropped` counts by reason those that were not handed over.
    """
    episodes = [episode for group in groups for episode in group]
    cut = sum(any(call.is_truncated and not call.reject for call in e.transitions) for e in episodes)
    silent = sum(episode.rollout.rollout_id not in loud for episode in episodes)
    lost, kept = sum(dropped.values()), max(1, len(episodes))
    return {
        "truncated_share": cut / kept,
        "dropped_share": lost / max(1, lost + len(episodes)),
        "silent_share": silent / kept,
    }


def _advantages(
    credits: Sequence[Sequence[CallCredit]],
    *,
    places: Sequence[int],
    estimator: Estimator,
    tokens: Mapping[str, int],
) -> list[dict[str, float]]:
    """Return the advantages by span id for every episode; `places` is the group of each, `tokens` those by span id."""
    # Finished advantages (hierarchical and counterfactual credit) pass through; normalising them again would undo them.
    result: list[dict[str, float]] = [{c.span_id: c.value for c in calls if c.is_advantage} for calls in credits]
    open_calls = [(index, call) for index, calls in enumerate(credits) for call in calls if not call.is_advantage]
    # Calls are compared when they share both the group and the credit's baseline key: a key such as "writer" of one
    # task must not meet that of another.
    keys: dict[tuple[int, str], int] = {}
    for index, call in open_calls:
        keys.setdefault((places[index], call.baseline), len(keys))
    # float64: a group's deviation is a small difference of rewards.
    advantages_N = estimate(
        torch.tensor([call.value for _, call in open_calls], dtype=torch.float64),
        rollouts_N=torch.tensor([index for index, _ in open_calls], dtype=torch.int64),
        groups_N=torch.tensor([keys[places[index], call.baseline] for index, call in open_calls], dtype=torch.int64),
        estimator=estimator,
        tokens_N=torch.tensor([tokens.get(call.span_id, 0) for _, call in open_calls], dtype=torch.int64),
    )
    for (index, call), advantage in zip(open_calls, numbers(advantages_N), strict=True):
        result[index][call.span_id] = advantage
    return result


def _tokens(episodes: Sequence[Episode]) -> dict[str, int]:
    """Return the tokens that every call wrote, by span id."""
    parts = [part for episode in episodes for row in episode.rows for part in row.segments]
    return {part.span_id: part.stop - part.start for part in parts}


def _metrics(groups: Sequence[Sequence[Episode]], samples: Sequence[RowSample]) -> dict[str, float]:
    # A missing reward is left out of the mean, not taken for 0.
    rewards = torch.tensor([e.reward for group in groups for e in group if e.reward is not None], dtype=torch.float64)
    # A group is silent when no rollout of it has an advantage: all right, all wrong, or nothing to train.
    loud = {sample.rollout for sample in samples if not sample.is_silent}
    silent = sum(1 for group in groups if not any(e.rollout.rollout_id in loud for e in group))
    calls = [call for group in groups for e in group for call in e.transitions if not call.reject]
    return {
        "reward": float(rewards.mean()) if len(rewards) else 0.0,
        "reward_std": float(rewards.std()) if len(rewards) > 1 else 0.0,  # over the batch, divided by n - 1
        "groups": float(len(groups)),
        "groups_silent": float(silent),
        "rollouts": float(sum(len(group) for group in groups)),
        "rows": float(len(samples)),
        "calls_distribution_changed": float(sum(call.is_distribution_changed for call in calls)),
    }
