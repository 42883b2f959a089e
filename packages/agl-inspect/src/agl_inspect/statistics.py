"""Compares the rewards of two versions: computes intervals of the difference and of the ratio of their means.

Welch 1947, "The generalization of Student's problem when several different population variances are involved";
Fieller 1954, "Some problems in interval estimation", for the ratio.
:func:`compare` treats rollouts as independent. Several rollouts of one task are not independent, so its intervals are
slightly too narrow. :func:`compare_tasks` takes the tasks that both versions ran, and computes Student's interval of
the differences of their means. This interval is narrower where tasks differ more than versions do.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, covariance, fmean, variance
from typing import Any

from agl.errors import ConfigError
from agl.hints import count_of
from agl.schemas import Record
from agl_inspect.text import ends

FEWEST_ALIKE = 6
"""From this number of tasks on, differences that are all equal count as significant.

Their interval has no width and shows nothing, but the probability that all differences have the same sign by chance is
2 / 2 ** 6 < 0.05.
"""


class Comparison(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The rewards of a new version against those of an old one.

    Attributes:
        difference: Mean of the new rewards minus that of the old ones.
        low: Lower end of the difference's interval.
        high: Upper end of the difference's interval.
        confidence: Confidence level of the intervals.
        policy_improvement_ratio: Mean of the new rewards divided by that of the old ones; ``None`` unless the old
            mean is above 0.
        old_count: Number of old rewards.
        new_count: Number of new rewards.
        ratio_low: Lower end of the ratio's interval, which contains 1 exactly when the difference's interval contains
            0. ``None`` if the old mean is not clearly above 0 at this confidence: the interval is unbounded then.
        ratio_high: Upper end of the ratio's interval; ``None`` exactly when ``ratio_low`` is.
        paired_tasks: Number of tasks by which rewards were paired; 0 if they were not paired.
    """

    difference: float
    low: float
    high: float
    confidence: float
    policy_improvement_ratio: float | None
    old_count: int
    new_count: int
    ratio_low: float | None = None
    ratio_high: float | None = None
    paired_tasks: int = 0

    @property
    def words(self) -> str:
        """The comparison in one line."""
        paired = f", paired by {count_of(self.paired_tasks, 'task')}" if self.paired_tasks else ""
        interval = ends(self.low, self.high, "+.4f", label=f", {self.confidence:.0%} interval")
        counts = f"{self.old_count} and {count_of(self.new_count, 'rollout')}"
        return f"difference {self.difference:+.4f}{interval}{_ratio(self)}{paired}, {counts}"


def compare(old: Sequence[float], new: Sequence[float], *, confidence: float = 0.95) -> Comparison:
    """Compare two samples of rewards; raises :class:`ConfigError` if a sample has fewer than two rewards."""
    if len(old) < 2 or len(new) < 2:
        raise ConfigError(
            f"there are {count_of(len(old), 'reward')} of the old version and {len(new)} of the new one, and an "
            "interval needs two of each at least; record more rollouts"
        )
    parts = variance(old) / len(old), variance(new) / len(new)
    quantile = student_quantile(0.5 + _checked(confidence) / 2, _freedom(parts, (len(old), len(new))))
    compared = _compared((fmean(old), fmean(new)), parts, quantile=quantile)
    return Comparison(confidence=confidence, old_count=len(old), new_count=len(new), **compared)


def compare_tasks(
    old: Mapping[str, Sequence[float]], new: Mapping[str, Sequence[float]], *, confidence: float = 0.95
) -> Comparison:
    """Compare two samples of rewards by task, over the tasks that both samples have.

    Raises :class:`ConfigError` if the samples have fewer than two tasks in common.
    """
    common = [task for task in old if task in new]
    if len(common) < 2:
        shared = count_of(len(common), "task")
        raise ConfigError(f"the samples have {shared} in common, and an interval needs two at least")
    first, second = ([fmean(rewards[task]) for task in common] for rewards in (old, new))
    n = len(common)
    compared = _compared(
        (fmean(first), fmean(second)),
        (variance(first) / n, variance(second) / n),
        shared=covariance(first, second) / n,
        quantile=student_quantile(0.5 + _checked(confidence) / 2, n - 1),
    )
    counts = [sum(len(rewards[task]) for task in common) for rewards in (old, new)]
    return Comparison(confidence=confidence, old_count=counts[0], new_count=counts[1], paired_tasks=n, **compared)


def _compared(
    means: tuple[float, float], parts: tuple[float, float], *, quantile: float, shared: float = 0.0
) -> dict[str, Any]:
    """Return the difference and the ratio of two means with their intervals.

    Args:
        means: The old mean and the new one.
        parts: The variances of the two means.
        quantile: Half the interval's width in standard errors.
        shared: The covariance of the two means.
    """
    difference = means[1] - means[0]
    width = quantile * math.sqrt(max(0.0, sum(parts) - 2 * shared))
    ratio_low, ratio_high = _ratio_interval(means, parts, quantile=quantile, shared=shared)
    return {
        "difference": difference,
        "low": difference - width,
        "high": difference + width,
        "policy_improvement_ratio": means[1] / means[0] if means[0] > 0 else None,
        "ratio_low": ratio_low,
        "ratio_high": ratio_high,
    }


def _ratio_interval(
    means: tuple[float, float], parts: tuple[float, float], *, quantile: float, shared: float
) -> tuple[float | None, float | None]:
    """Return Fieller's interval of the ratio of two means; both ends are ``None`` if it is unbounded.

    It contains every ratio r with (new - r * old)^2 <= quantile^2 * (part_new - 2 * r * shared + r^2 * part_old).
    """
    old, new = means
    squared = quantile**2
    leading, middle = old**2 - squared * parts[0], old * new - squared * shared
    if old <= 0 or leading <= 0:
        return None, None
    root = math.sqrt(max(0.0, middle * middle - leading * (new**2 - squared * parts[1])))
    return (middle - root) / leading, (middle + root) / leading


def interval(values: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float]:
    """Return the ends of Student's interval of the values' mean; infinite for fewer than two values."""
    if len(values) < 2:
        return -math.inf, math.inf
    quantile = student_quantile(0.5 + _checked(confidence) / 2, len(values) - 1)
    width = quantile * math.sqrt(variance(values) / len(values))
    return fmean(values) - width, fmean(values) + width


class Criterion(Record, frozen=True, kw_only=True):
    """The condition under which one version counts as better than another.

    Both versions need ``min_rollouts`` rewards, and the interval of the difference must lie above ``min_gain``.
    """

    confidence: float = 0.95
    min_gain: float = 0.0
    min_rollouts: int = 20


def check_better(old: tuple[str, Sequence[float]], new: tuple[str, Sequence[float]], bar: Criterion) -> str:
    """Compare two versions, given as (name, rewards); return the comparison in one line if ``new`` is better.

    Raises:
        ConfigError: The rewards do not meet the criterion ``bar``; the message gives the numbers.
    """
    head = f"{new[0]} is not shown to be better than {old[0]}"
    if min(len(old[1]), len(new[1])) < max(2, bar.min_rollouts):
        raise ConfigError(
            f"{head}: there are {count_of(len(old[1]), 'reward')} of the old version and {len(new[1])} of the new "
            f"one, and the criterion wants {max(2, bar.min_rollouts)} of each; record more rollouts, or lower "
            "--min-rollouts"
        )
    result = compare(old[1], new[1], confidence=bar.confidence)
    if result.low <= bar.min_gain:
        raise ConfigError(
            f"{head}: {result.words}; the interval must lie above {bar.min_gain:g}. "
            "Record more rollouts, or promote without --if-better"
        )
    return result.words


def _ratio(result: Comparison) -> str:
    if result.policy_improvement_ratio is None:
        return ", no ratio to a mean that is not above 0"
    unknown = " without interval, because the old mean is not clear of 0" if result.ratio_low is None else ""
    interval = ends(result.ratio_low, result.ratio_high) or unknown
    return f", policy_improvement_ratio {result.policy_improvement_ratio:.3f}{interval}"


def student_quantile(probability: float, freedom: float) -> float:
    """Return the quantile of Student's t distribution, by bisection of :func:`student_cdf` to 1e-9."""
    if math.isinf(freedom):
        return NormalDist().inv_cdf(probability)
    if probability < 0.5:
        return -student_quantile(1.0 - probability, freedom)
    low, high = 0.0, 1.0
    while student_cdf(high, freedom) < probability and high < 1e9:
        high *= 2
    while high - low > 1e-9 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def student_cdf(value: float, freedom: float) -> float:
    """Return the value of Student's distribution function, computed by the incomplete beta function."""
    tail = 0.5 * _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + value * value))
    return 1.0 - tail if value >= 0 else tail


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularised incomplete beta function by its continued fraction (Lentz's method)."""
    if x <= 0.0 or x >= 1.0:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _incomplete_beta(b, a, 1.0 - x)
    log_front = a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    tiny, c = 1e-300, 1.0
    d = 1.0 / _away(1.0 - (a + b) * x / (a + 1), tiny)
    fraction = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1.0 / _away(1.0 + term * d, tiny)
            c = _away(1.0 + term / c, tiny)
            fraction *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return math.exp(log_front) * fraction / a


def _away(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny


def _freedom(parts: tuple[float, float], counts: tuple[int, int]) -> float:
    """Return the degrees of freedom after Welch and Satterthwaite; infinite if no reward varies."""
    below = sum(part**2 / (count - 1) for part, count in zip(parts, counts, strict=True))
    return sum(parts) ** 2 / below if below > 0 else math.inf


def _checked(confidence: float) -> float:
    if not 0.0 < confidence < 1.0:
        raise ConfigError(f"the confidence {confidence} is not between 0 and 1; give one such as 0.95")
    return confidence
