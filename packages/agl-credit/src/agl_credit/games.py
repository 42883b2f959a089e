"""Shares in a cooperative game: players, a worth for every coalition, and what each player adds.

A coalition is given by who is *replaced*: the empty set is the run as it was, the set of all players the run with
every part replaced. Nothing here knows of rollouts.
"""

import math
import random
from collections.abc import Callable, Sequence
from itertools import permutations

Replaced = frozenset[str]
Worth = Callable[[Replaced], float]
Order = tuple[str, ...]


def leave_one_out(players: Sequence[str], worth: Worth) -> dict[str, float]:
    """v(N) - v(N without i) for every player i."""
    whole = worth(frozenset())
    return {player: whole - worth(frozenset({player})) for player in players}


def shapley(players: Sequence[str], orders: Sequence[Order], worth: Worth) -> dict[str, float]:
    """The mean over ``orders`` of what a player adds to those before it.

    Every order adds up to v(N) - v(nobody), so the shares do too, however few orders there are; over all orders of
    the players they are the Shapley values.
    """
    added: dict[str, list[float]] = {player: [] for player in players}
    for order in orders:
        before = worth(frozenset(order))
        for position, player in enumerate(order):
            after = worth(frozenset(order[position + 1 :]))
            added[player].append(after - before)
            before = after
    return {player: math.fsum(found) / len(orders) for player, found in added.items()}


def orders_of(players: Sequence[str], *, limit: int, draw: random.Random) -> list[Order]:
    """All orders of the players when there are at most ``limit``, else as many random ones, each with its reverse.

    An order and its reverse are antithetic: a player that comes early in one comes late in the other, which takes
    variance out of the mean (Mitchell et al. 2022, "Sampling Permutations for Shapley Value Estimation").
    """
    if math.factorial(len(players)) <= limit:
        return list(permutations(players))
    found: list[Order] = []
    while len(found) < limit:
        order = tuple(draw.sample(list(players), len(players)))
        found += [order, order[::-1]]
    return found[:limit]


def coalitions_of(orders: Sequence[Order]) -> list[Replaced]:
    """Who is replaced in each coalition whose worth :func:`shapley` asks for, the run as it was left out."""
    found = dict.fromkeys(frozenset(order[start:]) for order in orders for start in range(len(order)))
    return list(found)
