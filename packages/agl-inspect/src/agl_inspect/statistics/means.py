"""Means that hold for every finite number: rewards near the largest float have a mean, though their sum has none."""

import math
import sys
from collections.abc import Sequence
from statistics import fmean

_LARGE = 1e150
"""Magnitude from which squares may overflow."""


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one number, which is finite wherever all of them are.

    It is that of :func:`statistics.fmean`, to the last bit, unless their sum overflows; not a number where infinities
    of both signs meet.
    """
    try:
        return fmean(values)
    except ValueError:  # inf - inf
        return math.nan
    except OverflowError:
        power = 2.0 ** len(values).bit_length()  # a division by it rounds nothing
        return math.fsum(value / power for value in values) / (len(values) / power)


def scaled(values: Sequence[float]) -> tuple[list[float], float]:
    """Return the numbers divided by a power of two so that sums of their squares are finite, and that power.

    It is 1 where they are small enough, and where one is not finite.
    """
    most = max(map(abs, values), default=0.0)
    scale = 1.0 if most < _LARGE or not math.isfinite(most) else math.ldexp(1.0, math.frexp(most)[1] - 1)
    return [value / scale for value in values], scale


def clamped(value: float) -> float:
    """Return the closest finite number, for what overflowed."""
    return max(-sys.float_info.max, min(sys.float_info.max, value))
