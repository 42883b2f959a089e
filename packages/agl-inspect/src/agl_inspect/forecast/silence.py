"""Estimates the share of groups whose rollouts all get the same reward, for group sizes that were not run.

A task gives each reward v with a probability p(v). A group of n rollouts is silent if n draws are equal, which has the
probability sum over v of p(v)**n. Observed shares in place of p(v) would overestimate it, most of all for tasks with
few rollouts: if a task has two rollouts and they agree, it would count as a task that always agrees.

- If a task has at least n rollouts, the share of its n-subsets with equal rewards is an unbiased estimate. The mean
  over such tasks is the estimate ``counted``.
- For larger groups there is no unbiased estimate. The probabilities of the tasks are assumed to follow a Dirichlet
  distribution around the shares of the rewards in all rollouts; with two rewards, this is the beta-binomial model. Its
  concentration is chosen so that two rollouts of one task agree as often as counted. This is the estimate ``model``.

Rewards that differ by less than 1e-6 are equal.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import comb
from statistics import fmean
from typing import Literal

from agl.schemas import Record

SIZES = (2, 4, 8, 16, 32)
"""The group sizes that a forecast compares."""

NEARLY = 0.8
"""A group size is acceptable if it gives at least this share of the best size's groups with a gradient."""

_PLACES = 6
_MOST = 1e6
"""From this concentration on, all tasks count as alike."""


class SilentShare(Record, frozen=True, kw_only=True):
    """The expected share of silent groups among groups of one size.

    Attributes:
        size: Rollouts per group.
        share: The expected share of silent groups, between 0 and 1.
        basis: The kind of the estimate: ``counted`` among the recorded rollouts of a task, or from the ``model`` for
            larger groups.
    """

    size: int
    share: float
    basis: Literal["counted", "model"]


def silent_shares(groups: Sequence[Sequence[float]], sizes: Sequence[int] = SIZES) -> list[SilentShare]:
    """Estimate the share of silent groups for several sizes; empty if no task has two rewards.

    Args:
        groups: The rewards of each task's rollouts.
        sizes: Group sizes, each at least 1.
    """
    counts = [Counter(round(reward, _PLACES) for reward in rewards) for rewards in groups]
    compared = [count for count in counts if count.total() > 1]
    return [_share(compared, size) for size in sizes] if compared else []


def best_size(shares: Sequence[SilentShare], *, rollouts: int, tasks: int) -> SilentShare | None:
    """Return the largest group size that gives nearly the largest number of groups with a gradient in a step.

    Small groups give the most groups with a gradient, but larger groups have a better baseline. So the result is the
    largest size that still gives at least the share ``NEARLY`` of the largest number; ``None`` if no size gives any.

    Args:
        shares: The estimates.
        rollouts: Rollouts per step, whatever the group size.
        tasks: Training tasks; a step takes each at most once.
    """
    gives = {
        one.size: loud_groups(one, rollouts=rollouts) for one in shares if one.size * tasks >= rollouts >= one.size
    }
    most = max(gives.values(), default=0.0)
    near = [one for one in shares if most > 0 and gives.get(one.size, 0.0) >= NEARLY * most]
    return max(near, key=lambda one: one.size, default=None)


def loud_groups(share: SilentShare, *, rollouts: int) -> float:
    """Return the expected number of groups with a gradient if ``rollouts`` rollouts are split into groups."""
    return rollouts // share.size * (1 - share.share)


def _share(counts: Sequence[Mapping[float, int]], size: int) -> SilentShare:
    large = [count for count in counts if sum(count.values()) >= size]
    if 2 * len(large) >= len(counts):
        return SilentShare(size=size, share=fmean(_equal(count, size) for count in large), basis="counted")
    return SilentShare(size=size, share=_modelled(counts, size), basis="model")


def _equal(count: Mapping[float, int], size: int) -> float:
    """Return the share of all subsets of ``size`` rollouts in which the rewards are equal."""
    return sum(comb(number, size) for number in count.values()) / comb(sum(count.values()), size)


def _modelled(counts: Sequence[Mapping[float, int]], size: int) -> float:
    weights = _pooled(counts)
    within = fmean(_equal(count, 2) for count in counts)
    across = sum(weight * weight for weight in weights)
    # The chance that two rollouts of one task agree is (1 + a * across) / (1 + a) for the concentration a.
    spread = min(_MOST, (1 - within) / (within - across)) if within > across else _MOST
    if spread <= 0:
        return 1.0
    share = 0.0
    for weight in weights:
        chance = 1.0
        for drawn in range(size):
            chance *= (spread * weight + drawn) / (spread + drawn)
        share += chance
    return min(1.0, share)


def _pooled(counts: Sequence[Mapping[float, int]]) -> list[float]:
    """Return the share of each reward among all rollouts, where all tasks have the same weight."""
    pooled: dict[float, float] = {}
    for count in counts:
        total = sum(count.values())
        for value, number in count.items():
            pooled[value] = pooled.get(value, 0.0) + number / total / len(counts)
    return list(pooled.values())
