"""Estimates: means of rewards with intervals that never leave the range of the rewards.

The interval is Wilson's (Wilson 1927, "Probable inference, the law of succession, and statistical inference"), for
means of values in [0, 1]. With m the mean of n values and z the 97.5 % quantile of the normal distribution, its ends
are the solutions p of

    (m - p)^2 = z^2 * phi * p * (1 - p) / n

where phi = 1 gives Wilson's own interval, for values that are 0 or 1: then p * (1 - p) is their variance. Thirteen
values of 1 give [0.772, 1], and not [1, 1] as Student's t does.

Deviation, for partial credit: phi is the variance of the values divided by m * (1 - m), the largest possible variance,
computed as if `COINS` more values had the largest variance. Values of 0 and 1 have phi = 1 whatever `COINS` is.
"""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean

from agl.schemas import Record

COINS = 4
"""Number of values with the largest variance that are added, so that equal values do not get an interval of width 0."""

_Z = 1.959964


class Range(Record, frozen=True, kw_only=True):
    """The smallest and the largest reward that a rollout can get."""

    low: float = 0.0
    high: float = 1.0

    @property
    def of_differences(self) -> "Range":
        """The range of the difference between two rewards of this range."""
        return Range(low=self.low - self.high, high=self.high - self.low)


class Estimate(Record, frozen=True, kw_only=True):
    """A mean reward over ``n`` tasks with its 95 % confidence interval."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def words(self) -> str:
        """Mean and interval as text, such as ``0.925 [0.839, 0.968]``."""
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def estimate(values: Sequence[float], within: Range) -> Estimate:
    """Return the mean and the 95 % confidence interval of independent values within a range.

    The interval contains the mean and lies within the range, which is widened if a value is outside.
    """
    low, high = min(within.low, *values), max(within.high, *values)
    width, n = high - low or 1.0, len(values)  # a range of one number has no width
    shares = [(value - low) / width for value in values]  # in [0, 1]
    mean = fmean(shares)
    # A rounding error beyond an end of the range would make the variance of a coin negative.
    coin = max(0.0, mean * (1 - mean))
    spread = sum((share - mean) ** 2 for share in shares)
    phi = (spread + COINS * coin) / ((n + COINS) * coin) if coin else 1.0
    z2 = _Z**2 * phi / n  # z^2 * phi / n: the two ends are those of Wilson's interval with n / phi values
    centre, half = mean + z2 / 2, sqrt(z2 * coin + z2**2 / 4)
    ends = [min(1.0, max(0.0, (centre + sign * half) / (1 + z2))) for sign in (-1, 1)]
    first, last = min(ends[0], mean), max(ends[1], mean)  # an end differs from a mean of 0 or 1 by rounding alone
    return Estimate(mean=fmean(values), low=low + width * first, high=low + width * last, n=n)


def exactly_nothing(n: int) -> Estimate:
    """Return the difference of a candidate from itself: zero, with an interval of no width."""
    return Estimate(mean=0.0, low=0.0, high=0.0, n=n)
