"""Compares the rewards of two versions by the gate, and computes the interval of a mean for display.

A comparison has a verdict only if the evidence is strong enough, see :class:`agl.Gate`. It may be repeated after every
new rollout: frequent looks do not make a wrong verdict likelier.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean, variance
from typing import Literal

from agl import Gate
from agl.acceptance import mean_interval, odds_text
from agl.errors import ConfigError
from agl.hints import count_of
from agl.schemas import Record
from agl_inspect.text import ends


class Comparison(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The rewards of a new version against those of an old one.

    Attributes:
        verdict: ``better`` or ``worse`` if the evidence for it has reached ``threshold``.
        difference: The estimated gain: the mean difference, new minus old.
        low: Lower bound of the difference, wrong with a probability of at most 1 / ``threshold``.
        high: Upper bound of the difference, wrong with a probability of at most 1 / ``threshold``.
        evidence: The odds that the new version is better; 14 means 14 to 1.
        evidence_of_harm: The odds that the new version is worse.
        threshold: The odds from which a verdict follows.
        pairs: Number of differences: of tasks, of other pairs, or of units of a split.
        needed: About how many of them would do if the rest is like these, at least one more; ``None`` if no number
            would.
        policy_improvement_ratio: Mean of the new rewards divided by that of the old ones; ``None`` unless the old
            mean is above 0.
        old_count: Number of old rewards that count.
        new_count: Number of new rewards that count.
        paired_tasks: Number of tasks by which rewards were paired; 0 if they were not.
        is_split: Whether a split assigned the versions, so each reward was compared with the usual old one.
        span: The largest possible reward minus the smallest one; the bounds and the error hold only within it.
    """

    verdict: Literal["better", "worse", "undecidable"]
    difference: float
    low: float
    high: float
    evidence: float
    evidence_of_harm: float
    threshold: float
    pairs: int
    needed: int | None
    policy_improvement_ratio: float | None
    old_count: int
    new_count: int
    paired_tasks: int = 0
    is_split: bool = False
    span: float = 1.0

    @property
    def words(self) -> str:
        """The comparison in one line."""
        return f"{self._outcome}: {self.facts}"

    @property
    def facts(self) -> str:
        """The difference with its interval, the number of rewards, and how many more would lead to a verdict."""
        interval = ends(self.low, self.high, "+.4f")
        return f"difference {self.difference:+.4f}{interval}{self._ratio}, {self._counts}{self._rest}"

    @property
    def _outcome(self) -> str:
        found = f"evidence {odds_text(max(self.evidence, self.evidence_of_harm))}"
        if self.verdict != "undecidable":
            return f"{self.verdict}, {found}"
        favoured = "old" if self.evidence_of_harm > self.evidence else "new"
        side = "" if found == "evidence 1 to 1" else f" for the {favoured} version"
        return f"cannot be told apart, {found}{side}, {odds_text(self.threshold)} needed"

    @property
    def _ratio(self) -> str:
        ratio = self.policy_improvement_ratio
        return "" if ratio is None else f", policy_improvement_ratio {ratio:.3f}"

    @property
    def _counts(self) -> str:
        paired = f"paired by {count_of(self.paired_tasks, 'task')}, " if self.paired_tasks else ""
        span = "" if self.span == 1 else f" with rewards within a span of {self.span:g}"
        return f"{paired}{self.old_count:,} and {count_of(self.new_count, 'rollout')}{span}"

    @property
    def _rest(self) -> str:
        if self.verdict != "undecidable":
            return ""
        things = "tasks" if self.paired_tasks else "users or conversations" if self.is_split else "pairs"
        return f"; about {self.needed:,} {things} would do" if self.needed else "; more of the same would not do"


def compare(
    old: Sequence[float], new: Sequence[float], *, error: float = 0.025, gain: float = 0.0, span: float | None = None
) -> Comparison:
    """Compare two samples of independent rewards; the first old reward is paired with the first new one, and so on.

    Rewards without a partner are left out.

    Args:
        old: The rewards of the old version, in an order that does not depend on them, such as that of their arrival.
        new: The rewards of the new version.
        error: The largest probability of a wrong ``better``, and of a wrong ``worse``.
        gain: The gain in reward above which the new version counts as better.
        span: The largest possible reward minus the smallest one. By default 1 if all rewards lie between 0 and 1,
            otherwise the largest reward seen minus the smallest one. ``error`` then holds only if no reward can lie
            outside that range.

    Raises:
        ConfigError: A sample is empty.
    """
    need_both(old, new)
    count = min(len(old), len(new))
    old, new = old[:count], new[:count]
    gate = _filled(old, new, error=error, gain=gain, span=span)
    return comparison_of(gate, means=(fmean(old), fmean(new)), counts=(count, count))


def compare_tasks(
    old: Mapping[str, Sequence[float]],
    new: Mapping[str, Sequence[float]],
    *,
    error: float = 0.025,
    gain: float = 0.0,
    span: float | None = None,
) -> Comparison:
    """Compare two samples of rewards by task, over the tasks that both samples have, as :func:`compare` does.

    A task enters once, by the mean of its rewards.

    Raises:
        ConfigError: The samples have no task in common.
    """
    common = [task for task in old if task in new]
    if not common:
        raise ConfigError("the samples have no task in common; validate both versions on the same tasks")
    first, second = ([fmean(rewards[task]) for task in common] for rewards in (old, new))
    gate = _filled(first, second, error=error, gain=gain, span=span)
    counts = sum(len(old[task]) for task in common), sum(len(new[task]) for task in common)
    return comparison_of(gate, means=(fmean(first), fmean(second)), counts=counts, paired_tasks=len(common))


def comparison_of(
    gate: Gate,
    *,
    means: tuple[float, float],
    counts: tuple[int, int],
    paired_tasks: int = 0,
    is_split: bool = False,
) -> Comparison:
    """Return the state of a gate as a comparison.

    The verdict follows from the present evidence and not from the first verdict of the gate. So it does not depend on
    the order of the differences, which may follow the kinds of tasks.
    """
    threshold = 1 / gate.error
    is_better, is_worse = gate.evidence >= threshold, gate.evidence_of_harm >= threshold
    return Comparison(
        verdict="better" if is_better else "worse" if is_worse else "undecidable",
        difference=gate.mean,
        low=gate.lower,
        high=gate.upper,
        evidence=gate.evidence,
        evidence_of_harm=gate.evidence_of_harm,
        threshold=threshold,
        pairs=gate.count,
        needed=None if gate.needed is None else max(gate.needed, gate.count + 1),
        policy_improvement_ratio=means[1] / means[0] if means[0] > 0 else None,
        old_count=counts[0],
        new_count=counts[1],
        paired_tasks=paired_tasks,
        is_split=is_split,
        span=gate.span,
    )


def _filled(old: Sequence[float], new: Sequence[float], *, error: float, gain: float, span: float | None) -> Gate:
    gate = Gate(error=error, gain=gain, span=span_of([*old, *new]) if span is None else span)
    for before, after in zip(old, new, strict=True):
        gate.update(before, after)
    return gate


def need_both(old: Sequence[float], new: Sequence[float]) -> None:
    """Raise :class:`ConfigError` unless both versions have rewards."""
    if not old or not new:
        raise ConfigError(
            f"there are {count_of(len(old), 'reward')} of the old version and {len(new)} of the new one, and a "
            "comparison needs one of each at least; record more rollouts"
        )


def declared_span(old: Sequence[float], new: Sequence[float], *, ends: tuple[float, float], gain: float) -> float:
    """Return the length of the declared range of rewards, from which a promotion is decided.

    Raises:
        ConfigError: A version has no rewards, a reward lies outside the range, or no reward in it shows the gain.
    """
    need_both(old, new)
    low, high = ends
    if outside := [reward for reward in (*old, *new) if not low <= reward <= high]:
        raise ConfigError(
            f"the reward {outside[0]:g} is outside the range from {low:g} to {high:g}, on which the promotion's error "
            "depends; give the smallest and the largest possible reward with --range LOW HIGH"
        )
    if abs(gain) >= high - low:
        raise ConfigError(f"--min-gain {gain:g} is out of reach for rewards from {low:g} to {high:g}")
    return high - low


def span_of(rewards: Sequence[float]) -> float:
    """Return 1 if all rewards lie between 0 and 1, otherwise the largest one minus the smallest one."""
    low, high = min(rewards, default=0.0), max(rewards, default=1.0)
    return 1.0 if low == high or 0 <= low <= high <= 1 else high - low


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of a 95 % interval of the values' mean; infinite for fewer than two values.

    For values between 0 and 1 it stays there (:func:`agl.acceptance.mean_interval`); for others, whose range is not
    known, it is Student's.
    """
    if len(values) < 2:
        return -math.inf, math.inf
    if 0 <= min(values) <= max(values) <= 1:
        return mean_interval(values)
    width = student_quantile(0.975, len(values) - 1) * math.sqrt(variance(values) / len(values))
    return fmean(values) - width, fmean(values) + width


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
