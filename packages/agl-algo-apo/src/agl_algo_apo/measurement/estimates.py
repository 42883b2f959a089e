"""Estimates: means of rewards with intervals that never leave the range of the rewards."""

from collections.abc import Sequence
from statistics import fmean

from agl.acceptance import mean_interval
from agl.schemas import Record


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
    first, last = mean_interval(values, low=low, high=high)
    return Estimate(mean=fmean(values), low=first, high=last, n=len(values))


def exactly_nothing(n: int) -> Estimate:
    """Return the difference of a candidate from itself: zero, with an interval of no width."""
    return Estimate(mean=0.0, low=0.0, high=0.0, n=n)
