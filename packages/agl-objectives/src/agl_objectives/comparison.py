"""Compares the rollouts of a task: turns the credit of calls into scores, and scores into advantages, without torch.

The score s of a rollout is the mean credit of its calls: a rollout counts once, however many calls its agent makes.
If the credit has several baselines, such as one for each agent, a rollout has one score for each of them.

`relative` has the formulas of the group-relative estimators. They work on numbers, with which `group_relative` compares
scores, and on tensors, with which `estimators` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agl.schemas import CallCredit

__all__ = ["Rule", "Score", "compare_calls", "differ", "group_relative", "relative"]

Rule = Literal["grpo", "dr_grpo", "rloo"]
"""The group-relative estimators that need no torch."""

ROUNDING = 1e-6
"""Scores count as equal if they differ by less than this, relative to the largest |score| of the group or to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of a rollout in one group.

    Attributes:
        value: Mean credit of the calls, s.
        group: Number of the group, whose scores are compared with each other; from 0.
        rollout: Index of the rollout.
        calls: The calls that count; they share the baseline key.
    """

    value: float
    group: int
    rollout: int
    calls: list[CallCredit]


def compare_calls(
    credits: Sequence[Sequence[CallCredit]],
    *,
    groups: Sequence[int],
    estimate: Callable[[Sequence[Score]], tuple[Sequence[float], Sequence[float]]],
) -> list[dict[str, float]]:
    """Return the advantages of the calls of every rollout, by span id.

    A call whose credit says `is_advantage` keeps its value and does not count in the statistics.

    Args:
        credits: The credits of the calls of each rollout.
        groups: Number of the group of each rollout.
        estimate: Returns the advantage of each score, and the factor for the distance of a call from it.
    """
    # Finished advantages (hierarchical and counterfactual credit) stay as they are: they have a baseline already.
    result: list[dict[str, float]] = [{c.span_id: c.value for c in calls if c.is_advantage} for calls in credits]
    # Calls are compared if they share both the group and the credit's baseline key: calls of a "writer" must not be
    # compared with those of a "writer" in another task.
    compared: dict[tuple[int, str], dict[int, list[CallCredit]]] = {}
    for rollout, calls in enumerate(credits):
        for call in calls:
            if not call.is_advantage:
                compared.setdefault((groups[rollout], call.baseline), {}).setdefault(rollout, []).append(call)
    scores = [
        Score(value=fmean(call.value for call in calls), group=group, rollout=rollout, calls=calls)
        for group, members in enumerate(compared.values())
        for rollout, calls in members.items()
    ]
    if scores:
        for score, advantage, unit in zip(scores, *estimate(scores), strict=True):
            for call in score.calls:
                # A_call = A_score + (value - s) * unit. If all calls of a rollout have the same credit, the second term
                # is 0, and every call gets A_score.
                result[score.rollout][call.span_id] = advantage + (call.value - score.value) * unit
    return result


def group_relative(scores: Sequence[Score], *, rule: Rule) -> tuple[list[float], list[float]]:
    """Return the advantage of each score by `rule`, and the factor for distances from it; 0 in groups of one."""
    groups: dict[int, list[float]] = {}
    for score in scores:
        groups.setdefault(score.group, []).append(score.value)
    found, units = [0.0] * len(scores), [0.0] * len(scores)
    for place, score in enumerate(scores):
        own = groups[score.group]
        if len(own) > 1:  # a single rollout has no others to be compared with
            found[place], units[place] = relative(
                rule,
                score.value,
                size=len(own),
                mean=fmean(own),
                deviation=stdev(own),
                differs=differ(min(own), max(own)),
            )
    return found, units


def relative(
    rule: Rule, score: Any, *, size: int, mean: Any, deviation: Any, differs: bool, eps: float = 1e-6
) -> tuple[Any, Any]:
    """Return the advantage of scores by `rule`, and the factor for the distances of calls from them.

    Args:
        rule: The estimator.
        score: One score or several, s.
        size: Number of scores of the group, n, at least 2.
        mean: Mean of the group's scores.
        deviation: Standard deviation of the group's scores, with n - 1.
        differs: Whether the group's scores differ; if not, their advantages are exactly 0.
        eps: Added to the deviation: it bounds the advantage in groups that hardly differ.
    """
    if rule == "grpo":  # (s - mean_g) / (std_g + eps), Shao et al. 2024, arXiv 2402.03300, section 4.1.2
        # In a group of equal scores a distance cannot be scaled: a deviation that is only rounding would make it huge.
        return (score - mean) / (deviation + eps) * differs, 1.0 / (deviation + eps) * differs
    if rule == "rloo":
        # s - mean of the others, Ahmadian et al. 2024, arXiv 2402.14740. That mean is (n * mean - s) / (n - 1), so the
        # difference is (s - mean) * n / (n - 1).
        return (score * size / (size - 1) - mean * size / (size - 1)) * differs, 1.0
    # dr_grpo: s - mean_g, Liu et al. 2025, arXiv 2503.20783, section 3.2. Division by std_g would give more weight to
    # easy and hard tasks, whose std_g is small. A distance is not divided either.
    return (score - mean) * differs, 1.0


def differ(lowest: float, highest: float) -> bool:
    """Return whether scores from `lowest` to `highest` differ by more than rounding."""
    # Relative to the largest |score|: the rounding error of sums grows with their size.
    return highest - lowest > ROUNDING * max(1.0, abs(lowest), abs(highest))
