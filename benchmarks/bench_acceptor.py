"""The gate that accepts versions: its error over a whole run, its power, and identical versions.

Users are scripted, rewards are 0 or 1, and every seed is fixed, so the figures of two runs are equal.

*Error of a run*: 400 runs of 50 candidates that are as good as the present version, each with the share of an error of
0.05 that belongs to its number, and asked after every observation. The figure is the share of runs that promote any of
them. In *users* each of 50 users has ten conversations, whose rewards agree. In *late* feedback arrives up to hundreds
of conversations later, and complaints arrive first.

*Power*: the number of pairs until a better version has its verdict, over the number that a z-test of a fixed sample
needs, which has the same error and a power of 90 %, and knows the gain and the noise. In *shared* 70 % of the pairs get
the same draw for both versions.

*Identical*: gates over 200 pairs of a version with itself that say better or worse.

Run alone: ``python -m benchmarks acceptor``; it takes three minutes.
"""

import math
import random
from collections.abc import Callable, Iterator
from statistics import NormalDist, fmean, median, quantiles

from agl.acceptance import Gate, error_for
from benchmarks._harness import Figure

ERROR, BASE, POWER = 0.05, 0.6, 0.9
CANDIDATES = 50

Feed = Callable[[random.Random, Gate], None]
"""Feeds the observations of one candidate to a gate."""


def pairs(chance: random.Random, gate: Gate) -> None:
    """100 paired tasks."""
    for _ in range(100):
        gate.update(float(chance.random() < BASE), float(chance.random() < BASE))


def users(chance: random.Random, gate: Gate) -> None:
    """50 users with ten conversations each, who like either most answers or few; a fifth gets the candidate."""
    for _ in range(50):
        usual = chance.choice((0.3, 0.9))
        reward = fmean(float(chance.random() < usual) for _ in range(10))
        gate.arrive(reward, is_new=chance.random() < 0.2, share=0.2)


def late(chance: random.Random, gate: Gate) -> None:
    """100 conversations whose feedback arrives late and out of order; a fifth gets the candidate."""
    arrivals: list[tuple[float, float, bool]] = []
    for time in range(100):
        reward = float(chance.random() < BASE)
        delay = chance.expovariate(1 / 50 if reward else 1 / 5)
        arrivals.append((time + delay, reward, chance.random() < 0.2))
    for _, reward, is_new in sorted(arrivals):
        gate.arrive(reward, is_new=is_new, share=0.2)


def runs_with_a_promotion(feed: Feed, *, runs: int) -> int:
    """Count the runs in which any candidate without a gain is promoted."""
    return sum(_promotes(feed, random.Random(seed)) for seed in range(runs))


def _promotes(feed: Feed, chance: random.Random) -> bool:
    for number in range(1, CANDIDATES + 1):
        gate = Gate(error=error_for(number, error=ERROR))
        feed(chance, gate)
        if gate.verdict == "better":
            return True
    return False


def upper_bound(hits: int, count: int) -> float:
    """Return the upper end of the 95 % interval of a share (Wilson 1927)."""
    z, share = NormalDist().inv_cdf(0.975), hits / count
    middle = share + z**2 / (2 * count)
    return (middle + z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))) / (1 + z**2 / count)


def pair_of(chance: random.Random, gain: float, shared: float) -> tuple[float, float]:
    """Return the rewards of both versions on one task; a pair may share its draw."""
    first, second = chance.random(), chance.random()
    if chance.random() < shared:
        second = first
    return float(first < BASE), float(second < BASE + gain)


def fixed_sample(gain: float, shared: float, *, error: float) -> int:
    """Return the pairs that a z-test needs which knows the gain and the noise."""
    old, new = BASE * (1 - BASE), (BASE + gain) * (1 - BASE - gain)
    covariance = shared * BASE * (1 - BASE - gain)
    z = NormalDist().inv_cdf(1 - error) + NormalDist().inv_cdf(POWER)
    return math.ceil(z**2 * (old + new - 2 * covariance) / gain**2)


def pairs_until_better(gain: float, shared: float, *, error: float, runs: int) -> list[int]:
    """Return the number of pairs after which each run says better."""
    counts: list[int] = []
    for seed in range(runs):
        chance, gate = random.Random(seed), Gate(error=error)
        while gate.update(*pair_of(chance, gain, shared)) != "better":
            pass
        counts.append(gate.count)
    return counts


def power(*, runs: int) -> Iterator[Figure]:
    for number in (1, 20):
        error = error_for(number, error=ERROR)
        for gain, shared in ((0.15, 0.0), (0.15, 0.7), (0.10, 0.0), (0.10, 0.7)):
            counts = pairs_until_better(gain, shared, error=error, runs=runs)
            name = f"acceptor: candidate {number}, gain {gain:.2f}, {'shared' if shared else 'independent'} noise"
            fixed = fixed_sample(gain, shared, error=error)
            late_ones = quantiles(counts, n=20)[-1]
            yield _pairs(f"{name}, median", median(counts), fixed, at_most=1.0)
            yield _pairs(f"{name}, 95th percentile", late_ones, fixed, at_most=2.6)


def _pairs(name: str, value: float, fixed: int, *, at_most: float) -> Figure:
    bar = at_most * fixed
    return Figure(name=name, value=value, unit="pairs", bar=bar, better="lower", baseline=fixed, baseline_name="z-test")


def identical(*, gates: int) -> int:
    """Count the gates that say better or worse of a version and its replicate."""
    wrong = 0
    for seed in range(gates):
        chance, gate = random.Random(seed), Gate(error=ERROR / 2)
        pairs(chance, gate)
        pairs(chance, gate)
        wrong += gate.verdict != "open"
    return wrong


def _share(name: str, hits: int, count: int) -> list[Figure]:
    bars = ((f"{name}", hits / count, 0.05), (f"{name}, upper 95 % bound", upper_bound(hits, count), 0.075))
    return [
        Figure(name=f"acceptor: {each}", value=100 * value, unit="%", bar=100 * bar, better="lower")
        for each, value, bar in bars
    ]


def run(*, quick: bool) -> list[Figure]:
    """Return the figures of the gate."""
    runs = 20 if quick else 400
    figures: list[Figure] = []
    for feed in (pairs, users, late):
        figures += _share(f"runs that promote, {feed.__name__}", runs_with_a_promotion(feed, runs=runs), runs)
    figures += power(runs=20 if quick else 200)
    gates = 50 if quick else 1000
    return [*figures, *_share("identical versions told apart", identical(gates=gates), gates)]
