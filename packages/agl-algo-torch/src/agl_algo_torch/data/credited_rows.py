"""Prepares finished episodes for training: credit, then advantages over rollouts, then rows with masks.

Credit assignment gives each call a value and a baseline key, which names the calls that it is compared with. The
estimator turns these into advantages over the whole batch at once, because some estimators scale by the deviation of
the batch. The formulas are in `agl_objectives`, the tensors in `batch`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agl.errors import ConfigError
from agl_algo_torch.learner.batch import RowSample, from_row
from agl_objectives.advantages import call_advantages
from agl_objectives.answers import SoftOverlong, without_truncated
from agl_objectives.groups import trained_tokens
from agl_objectives.registry import find_estimator
from agl_objectives.reports import mean_and_deviation
from agl_objectives.uses import group_uses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agl.contracts import CallUse, Credit
    from agl.schemas import Episode
    from agl_algo_torch.learner.pictures import Pictures
    from agl_objectives.contract import Estimator
    from agl_objectives.groups import Baseline
    from agl_objectives.registry import FoundEstimator

__all__ = ["PreparedBatch", "live_rows", "prepare"]

ESTIMATOR = "grpo"
"""The default estimator of algorithms that learn from rewards in addition to something else."""

NO_PUNISHMENT = SoftOverlong()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBatch:
    """A batch of episodes that is ready to train.

    Attributes:
        samples: The rows, in the order of the episodes.
        metrics: Metrics to log.
        calls: Number of calls with credit.
        final: Number of those calls whose credit is a finished advantage.
        loud: Ids of the rollouts with an advantage other than 0.
        uses: The use of every call, by rollout id.
    """

    samples: list[RowSample]
    metrics: dict[str, float]
    calls: int
    final: int
    loud: set[str]
    uses: dict[str, tuple[CallUse, ...]]


def estimator_of_samples(algorithm: str, name: str) -> FoundEstimator:
    """Return the estimator `name` for an algorithm that has no greedy rollouts.

    Raises ConfigError if the estimator compares with greedy rollouts, or `find_estimator` refuses it.
    """
    found = find_estimator(name)
    if found.entry.needs_baseline:
        raise ConfigError(
            f"{algorithm} got estimator = {name!r}, which compares with greedy rollouts, and {algorithm} makes none. "
            'Use another one, such as "rloo", or the algorithm grpo.'
        )
    return found


def needed_by(algorithm: str, switch: str, value: float, *, estimator: str) -> None:
    """Raise ConfigError if `estimator` is set but has no effect, because the setting `switch` has the `value` 0."""
    if not value and estimator != ESTIMATOR:
        raise ConfigError(
            f"{algorithm} got estimator = {estimator!r} without {switch}, so nothing uses it. Remove it, or give "
            f"{switch}."
        )


def prepare(
    groups: Sequence[Sequence[Episode]],
    *,
    credit: Credit,
    estimator: Estimator,
    mask_truncated: bool = False,
    overlong: SoftOverlong = NO_PUNISHMENT,
    baselines: Sequence[Baseline] = (),
    pictures: Pictures | None = None,
) -> PreparedBatch:
    """Return samples with advantages for groups of episodes that share a task.

    A call whose credit says `is_advantage` keeps its value as the advantage. Rows without a trained token are left out.
    With `mask_truncated`, calls that were cut at a token limit count in the statistics but are not trained.
    `overlong` lowers the credit of long answers. `baselines` has one entry per group, from the group's greedy rollout.
    `pictures` has those of the episodes, if the policy reads any.
    """
    episodes = [episode for group in groups for episode in group]
    # Credit is assigned one group at a time, because a credit may compare the rollouts of one task only.
    credits = [list(calls) for group in groups for calls in credit.assign(group)]
    credits = [overlong.applied(episode, calls) for episode, calls in zip(episodes, credits, strict=True)]
    places = [index for index, group in enumerate(groups) for _ in group]  # the group of each episode
    advantages = call_advantages(
        credits,
        groups=places,
        tokens=trained_tokens(episodes),
        estimator=estimator,
        baselines=[baselines[place] for place in places] if baselines else None,
    )
    if mask_truncated:
        advantages = [without_truncated(e, by_span) for e, by_span in zip(episodes, advantages, strict=True)]
    samples: list[RowSample] = []
    for episode, by_span in zip(episodes, advantages, strict=True):
        temperatures = {call.span_id: call.temperature for call in episode.transitions}
        # A shared prefix is in every row but trains in one row only, so a row may have no trained token.
        rows = [from_row(row, advantages=by_span, temperatures=temperatures, pictures=pictures) for row in episode.rows]
        samples += [row for row in rows if row.trained_tokens]
    final = sum(call.is_advantage for calls in credits for call in calls)
    given = [{call.span_id: call.value for call in calls} for calls in credits]
    loud = {sample.rollout for sample in samples if not sample.is_silent}
    return PreparedBatch(
        samples=samples,
        metrics=_metrics(groups, rows=len(samples), loud=loud),
        calls=sum(map(len, credits)),
        final=final,
        loud=loud,
        uses=group_uses(groups, trained=advantages, loud=loud, credits=given, advantages=advantages),
    )


def live_rows(
    episode: Episode, *, advantage: float = 1.0, has_temperature: bool = True, pictures: Pictures | None = None
) -> list[RowSample]:
    """Return the rows of an episode that have trained tokens; all trained tokens get the same `advantage`.

    With `has_temperature` log-probabilities are taken at the sampling temperature, otherwise at temperature 1.
    `pictures` has those of the episode, if the policy reads any.
    """
    live = {call.span_id: advantage for call in episode.transitions if not call.reject}
    temperatures = {call.span_id: call.temperature for call in episode.transitions} if has_temperature else None
    rows = [from_row(row, advantages=live, temperatures=temperatures, pictures=pictures) for row in episode.rows]
    return [row for row in rows if row.trained_tokens]


def _metrics(groups: Sequence[Sequence[Episode]], *, rows: int, loud: set[str]) -> dict[str, float]:
    # A missing reward is left out of the mean, not taken for 0.
    mean, deviation = mean_and_deviation([e.reward for group in groups for e in group if e.reward is not None])
    # A group is silent when no rollout of it has an advantage: all right, all wrong, or nothing to train.
    silent = sum(1 for group in groups if not any(e.rollout.rollout_id in loud for e in group))
    calls = [call for group in groups for e in group for call in e.transitions if not call.reject]
    return {
        "reward": mean,
        "reward_std": deviation,
        "groups": float(len(groups)),
        "groups_silent": float(silent),
        "rollouts": float(sum(len(group) for group in groups)),
        "rows": float(rows),
        "calls_distribution_changed": float(sum(call.is_distribution_changed for call in calls)),
    }
