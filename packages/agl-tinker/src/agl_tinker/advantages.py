"""Advantages of calls from their credit, in plain Python: nothing here needs torch.

S scores; those of a group g share a task and a baseline, and n_g is their number. The score s of a rollout in a group
is the mean credit of its calls there, so a rollout counts once, however often its agent calls the model.

    grpo      (s - mean_g) / (std_g + 1e-6)    Shao et al. 2024, arXiv 2402.03300, section 4.1.2
    dr_grpo   s - mean_g                       Liu et al. 2025, arXiv 2503.20783, section 3.2
    rloo      s - mean of the others in g      Ahmadian et al. 2024, arXiv 2402.14740

The advantage of a call is that of its rollout's score, plus the distance of its own credit from the score, scaled
alike. Standard deviations divide by n - 1. A group of one rollout, and one whose scores differ by rounding alone, has
advantages 0. These are the numbers of ``agl_objectives``, which has further estimators and needs torch.
"""

from collections.abc import Callable, Sequence
from statistics import fmean, stdev

from agl.schemas import CallCredit

_ROUNDING = 1e-6
"""Scores of a group closer than this, relative to its largest (at least 1), are equal."""

Scaled = tuple[list[float], float]
"""The advantage of every score of a group, and the unit of distances from it."""


def _differ(scores: Sequence[float]) -> bool:
    return max(scores) - min(scores) > _ROUNDING * max(1.0, *(abs(score) for score in scores))


def _grpo(scores: Sequence[float]) -> Scaled:
    if not _differ(scores):
        return [0.0] * len(scores), 0.0
    mean, unit = fmean(scores), 1.0 / (stdev(scores) + 1e-6)
    return [(score - mean) * unit for score in scores], unit


def _dr_grpo(scores: Sequence[float]) -> Scaled:
    mean, differ = fmean(scores), _differ(scores)
    return [(score - mean) * differ for score in scores], 1.0


def _rloo(scores: Sequence[float]) -> Scaled:
    mean, differ, n = fmean(scores), _differ(scores), len(scores)
    return [(score - mean) * n / (n - 1) * differ for score in scores], 1.0


ESTIMATORS: dict[str, Callable[[Sequence[float]], Scaled]] = {"grpo": _grpo, "dr_grpo": _dr_grpo, "rloo": _rloo}
"""Estimators by name; each takes the scores of a group of at least two."""


def call_advantages(
    credits: Sequence[Sequence[CallCredit]], *, groups: Sequence[int], estimator: str
) -> list[dict[str, float]]:
    """Return advantages by span id for every rollout.

    Args:
        credits: The credit of the calls of each rollout.
        groups: The task of each rollout.
        estimator: A name of :data:`ESTIMATORS`. A call whose credit says ``is_advantage`` keeps its value and takes no
            part in the statistics.
    """
    found = [{call.span_id: call.value for call in calls if call.is_advantage} for calls in credits]
    values: dict[tuple[int, str], dict[int, list[CallCredit]]] = {}
    for place, calls in enumerate(credits):
        for call in calls:
            if not call.is_advantage:
                values.setdefault((groups[place], call.baseline), {}).setdefault(place, []).append(call)
    for members in values.values():
        scores = [fmean(call.value for call in calls) for calls in members.values()]
        advantages, unit = ESTIMATORS[estimator](scores) if len(scores) > 1 else ([0.0], 0.0)
        for (place, calls), score, advantage in zip(members.items(), scores, advantages, strict=True):
            for call in calls:
                found[place][call.span_id] = advantage + (call.value - score) * unit
    return found
