"""Decides from rewards whether a new version is better than an old one, and computes the interval of a mean reward.

A :class:`Gate` reads differences of rewards one after another, and may be asked for its verdict after every one of
them: frequent looks do not make a wrong verdict likelier. It tests two claims: "the gain is at most `gain`" and "the
gain is at least 0". Against each claim it bets on every difference d. A bet L that starts with 1 has the wealth

    wealth = prod(1 + L * d),      d in [-1, 1],  0 < L < 1

and the mean over the bets in `BETS` is the evidence. If the claim is true, the evidence ever reaches 1/error with a
probability of at most `error` (Ville 1939), so such evidence refutes the claim.

    paired     both versions ran the same task: d = new - old, :meth:`Gate.update`
    unpaired   a split gave a share s of the traffic to the new version (A = 1) and the rest to the old one:

                   d = (r - c) * (A / s - (1 - A) / (1 - s)) * w,      w = min(s, 1 - s)

               c is the mean of the old version's rewards so far. The mean of d is w times the gain, whatever c is;
               :meth:`Gate.arrive`

The differences have to be independent: of several conversations of one user, or rollouts of one task, add the mean.
Tasks of a fixed list have to come in a random order, because a gate gives its verdict as soon as the evidence allows,
and the first tasks may favour one version. The evidence at the end of the list does not depend on the order.

Sources: Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting", for the bets;
Waudby-Smith et al. 2022, arXiv 2210.10768, for shares that change with time.
"""

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean
from typing import Literal

from agl.errors import ConfigError

BETS = tuple(0.05 * 19 ** (k / 29) for k in range(30))
"""The bets, from 0.05 to 0.95: small ones find small gains, large ones find large gains early."""

COINS = 4
"""Number of values with the largest variance that are added, so that equal values do not get an interval of width 0."""

_Z = 1.959964

Verdict = Literal["open", "better", "worse", "undecidable"]
"""``open`` asks for more differences; ``undecidable`` means that the budget is used up without a verdict."""


def error_for(candidate: int, *, error: float) -> float:
    """Return the share of a run's ``error`` that belongs to its candidate number ``candidate``, from 1.

    The shares are error * 6 / (pi * candidate)^2, and add up to ``error`` over any number of candidates.
    """
    return error * 6 / (math.pi * candidate) ** 2


class Gate:
    """Collects evidence for and against a new version, and gives a verdict.

    Args:
        error: The largest probability of the verdict ``better`` for a version that is not better by ``gain``, and of
            the verdict ``worse`` for a version that is not worse.
        gain: The gain in reward above which a version counts as better.
        budget: The number of differences after which an open gate becomes undecidable; ``None`` for no limit.
        span: The largest possible reward minus the smallest one.

    Attributes:
        verdict: The first verdict that was reached; later differences do not change it.
        count: The number of differences.

    Raises:
        ConfigError: A number is out of its range.
    """

    verdict: Verdict

    def __init__(self, *, error: float = 0.05, gain: float = 0.0, budget: int | None = None, span: float = 1.0) -> None:
        if not 0 < error < 1 or span <= 0 or abs(gain) >= span:
            raise ConfigError(
                f"a gate needs an error between 0 and 1, a span above 0 and a gain below it; got error={error:g}, "
                f"span={span:g} and gain={gain:g}"
            )
        self.error, self.gain, self.budget, self.span = error, gain, budget, span
        self.verdict = "open"
        self.count = 0
        self._better, self._worse = _Wealth(), _Wealth()
        self._seen: Counter[tuple[float, float]] = Counter()
        self._old: dict[str, tuple[float, int]] = {}

    def update(self, old: float, new: float) -> Verdict:
        """Add the rewards of both versions on one task, or their means over several rollouts of the task.

        Raises:
            ConfigError: The rewards are further apart than ``span``.
        """
        return self._add(self._difference(old, new), 1.0)

    def arrive(self, reward: float, *, is_new: bool, share: float, stratum: str = "") -> Verdict:
        """Add the reward of one unit of a split, such as a user.

        Args:
            reward: The unit's reward, or the mean over its conversations.
            is_new: Whether the unit got the new version.
            share: The probability with which the unit would get the new version, between 0 and 1.
            stratum: The kind of the unit's task. Rewards are compared with the old version's on the same kind, which
                lessens the noise.

        Raises:
            ConfigError: The rewards are further apart than ``span``, or the share is 0 or 1.
        """
        if not 0 < share < 1:
            raise ConfigError(f"a share of {share:g} compares nothing; the share has to lie between 0 and 1")
        total, n = self._old.get(stratum, (0.0, 0))
        usual = total / n if n else reward  # nothing to compare with yet, so the difference is 0
        if not is_new:
            self._old[stratum] = total + reward, n + 1
        weight = min(share, 1 - share)
        side = weight / share if is_new else -weight / (1 - share)
        return self._add(self._difference(usual, reward) * side, weight)

    @property
    def evidence(self) -> float:
        """The odds for the new version: 14 means 14 to 1 that it is better by more than ``gain``."""
        return self._better.odds

    @property
    def evidence_of_harm(self) -> float:
        """The odds against the new version: 14 means 14 to 1 that it is worse than the old one."""
        return self._worse.odds

    @property
    def mean(self) -> float:
        """The estimated gain: the mean difference, in rewards; 0 without differences."""
        weights = sum(weight * n for (_, weight), n in self._seen.items())
        return self.span * sum(d * n for (d, _), n in self._seen.items()) / weights if weights else 0.0

    @property
    def lower(self) -> float:
        """A lower bound of the gain, wrong with a probability of at most ``error``."""
        return self._bound(+1)

    @property
    def upper(self) -> float:
        """An upper bound of the gain, wrong with a probability of at most ``error``."""
        return -self._bound(-1)

    @property
    def needed(self) -> int | None:
        """About how many differences lead to a verdict if the rest is like the ones so far.

        ``None`` if no number would, because the mean lies between 0 and ``gain``, or there are no differences.
        """
        if not self.count:
            return None
        times = min(wealth.times_until(1 / self.error) for wealth in (self._better, self._worse))
        needed = times * self.count
        return math.ceil(needed - 1e-6) if needed < 1e9 else None

    @property
    def words(self) -> str:
        """The state of the gate in one line."""
        differences = f"{self.count:,} difference{'' if self.count == 1 else 's'}"
        gain = f"gain {self.mean:+.3f}, from {self.lower:+.3f} to {self.upper:+.3f}"
        if self.verdict == "better":
            return f"better, evidence {odds_text(self.evidence)}: {gain}, {differences}"
        if self.verdict == "worse":
            return f"worse, evidence {odds_text(self.evidence_of_harm)}: {gain}, {differences}"
        needed = "no number would do" if self.needed is None else f"about {max(self.needed, self.count + 1):,} would do"
        return f"cannot be told apart, evidence {odds_text(self.evidence)}: {gain}, {differences}; {needed}"

    def _add(self, difference: float, weight: float) -> Verdict:
        self.count += 1
        self._seen[difference, weight] += 1
        self._better.bet(_against(difference, weight * self.gain / self.span))
        self._worse.bet(-difference)
        if self.verdict == "open":
            self.verdict = self._judged()
        return self.verdict

    def _difference(self, old: float, new: float) -> float:
        difference = (new - old) / self.span
        if not abs(difference) <= 1 + 1e-9:
            raise ConfigError(
                f"the rewards {old:g} and {new:g} differ by more than {self.span:g}, the span of the gate; give the "
                "largest possible reward minus the smallest one"
            )
        return max(-1.0, min(1.0, difference))

    def _judged(self) -> Verdict:
        if self._better.odds >= 1 / self.error:
            return "better"
        if self._worse.odds >= 1 / self.error:
            return "worse"
        return "open" if self.budget is None or self.count < self.budget else "undecidable"

    def _bound(self, sign: int) -> float:
        """Return the largest gain that the differences, times ``sign``, refute, to 1e-5 of the span."""
        low, high = -1.0, 1.0
        while high - low > 1e-5:
            middle = (low + high) / 2
            seen = [(_against(sign * d, weight * middle), n) for (d, weight), n in self._seen.items()]
            logs = [sum([n * math.log1p(bet * d) for d, n in seen]) for bet in BETS]
            low, high = (middle, high) if _mean_odds(logs) >= 1 / self.error else (low, middle)
        return low * self.span


def odds_text(odds: float) -> str:
    """Return odds as text, such as ``14 to 1``."""
    if odds > 1e6:
        return "over 1,000,000 to 1"
    return f"{odds:,.0f} to 1" if odds >= 10 else f"{odds:.2g} to 1"


def mean_interval(values: Sequence[float], *, low: float = 0.0, high: float = 1.0) -> tuple[float, float]:
    """Return the ends of a 95 % interval of the mean of independent values between ``low`` and ``high``.

    The interval contains the values' mean, and never leaves the range. It is Wilson's (Wilson 1927, "Probable
    inference, the law of succession, and statistical inference"). With m the mean of n values in [0, 1] and z the
    97.5 % quantile of the normal distribution, its ends are the solutions p of

        (m - p)^2 = z^2 * phi * p * (1 - p) / n

    where phi = 1 gives Wilson's own interval, for values that are 0 or 1: then p * (1 - p) is their variance. Thirteen
    values of 1 give [0.772, 1], and not [1, 1] as Student's t does.

    Deviation, for partial credit: phi is the variance of the values divided by m * (1 - m), the largest possible
    variance, computed as if `COINS` more values had the largest variance. Values of 0 and 1 have phi = 1 whatever
    `COINS` is.
    """
    if low == high:
        return low, high
    width, n = high - low, len(values)
    shares = [(value - low) / width for value in values]  # in [0, 1]
    mean = fmean(shares)
    # A rounding error beyond an end of the range would make the variance of a coin negative.
    coin = max(0.0, mean * (1 - mean))
    spread = sum((share - mean) ** 2 for share in shares)
    phi = (spread + COINS * coin) / ((n + COINS) * coin) if coin else 1.0
    z2 = _Z**2 * phi / n  # z^2 * phi / n: the two ends are those of Wilson's interval with n / phi values
    centre, half = mean + z2 / 2, math.sqrt(z2 * coin + z2**2 / 4)
    first, last = (min(1.0, max(0.0, (centre + sign * half) / (1 + z2))) for sign in (-1, 1))
    # An end differs from a mean of 0 or 1 by rounding alone.
    return low + width * min(first, mean), low + width * max(last, mean)


class _Wealth:
    """The wealth of all bets against one claim, as logarithms."""

    def __init__(self) -> None:
        self._logs = [0.0] * len(BETS)

    def bet(self, difference: float) -> None:
        self._logs = [log + won for log, won in zip(self._logs, _won(difference), strict=True)]

    @property
    def odds(self) -> float:
        """The mean wealth."""
        return _mean_odds(self._logs)

    def times_until(self, odds: float) -> float:
        """Return how many times the differences so far would have to come to reach ``odds``; infinite for never."""
        if max(self._logs) <= 0:
            return math.inf
        low, high = 0.0, math.log(odds * len(BETS)) / max(self._logs)
        while high - low > 1e-9 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if _mean_odds([middle * log for log in self._logs]) >= odds else (middle, high)
        return high


def _mean_odds(logs: Sequence[float]) -> float:
    """Return the mean of wealths, given as logarithms; at most 1e300."""
    largest = min(max(logs), 690.0)
    return math.exp(largest) * math.fsum(math.exp(min(log - largest, 0.0)) for log in logs) / len(logs)


@lru_cache(10_000)
def _won(difference: float) -> tuple[float, ...]:
    """Return the logarithm of the factor by which each bet multiplies its wealth."""
    return tuple(math.log1p(bet * difference) for bet in BETS)


def _against(difference: float, gain: float) -> float:
    """Return the difference as seen by a bet against "the mean is at most ``gain``": above -1, and 0 at ``gain``."""
    return (difference - gain) / (1 + abs(gain))
