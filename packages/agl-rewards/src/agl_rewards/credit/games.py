"""Computes shares in a cooperative game: players, a worth for every coalition, and the part that each player adds.

A coalition is given by the players who are *replaced*: v(N), the run as it was, is the worth of the empty set, and
v(nobody) the worth of the set of all players. Nothing here knows of rollouts; `counterfactual` makes games of them.
"""

import math
import random
from collections.abc import Callable, Sequence
from itertools import permutations

Replaced = frozenset[str]
Worth = Callable[[Replaced], float]
Order = tuple[str, ...]


def leave_one_out(players: Sequence[str], worth: Worth) -> dict[str, float]:
    """Return v(N) - v(N without i) for every player i; n players cost n + 1 worths.

    The shares need not add up to anything: two players who can stand in for each other both get 0.
    """
    whole = worth(frozenset())  # v(N)
    return {player: whole - worth(frozenset({player})) for player in players}


def shapley(players: Sequence[str], orders: Sequence[Order], worth: Worth) -> dict[str, float]:
    """Return for every player the mean over ``orders`` of the worth that it adds to the players before it.

    Every order adds up to v(N) - v(nobody), so the shares do too, however few orders there are; over all orders of
    the players they are the Shapley values.
    """
    added: dict[str, list[float]] = {player: [] for player in players}
    for order in orders:
        # Players come in one by one: first all are replaced, then all but the first, until the run is as it was.
        before = worth(frozenset(order))  # v(nobody)
        for position, player in enumerate(order):
            after = worth(frozenset(order[position + 1 :]))  # v(the players up to this one)
            added[player].append(after - before)
            before = after  # the differences telescope: their sum over the order is v(N) - v(nobody)
    # phi_i = (1 / |orders|) sum over orders of [v(before i, and i) - v(before i)]. Every order has every player once,
    # so all means are over the same number and the shares add up to v(N) - v(nobody) as each order does.
    return {player: math.fsum(found) / len(orders) for player, found in added.items()}


def orders_of(players: Sequence[str], *, limit: int, draw: random.Random) -> list[Order]:
    """Return all orders of the players when there are at most ``limit``, else as many random ones in pairs.

    Each random order is followed by its reverse. The two are antithetic: a player that comes early in one comes late
    in the other, which takes variance out of the mean (Mitchell et al. 2022, "Sampling Permutations for Shapley Value
    Estimation"). With an odd ``limit`` the last order has no partner.
    """
    # n! orders: 6 for three players, 24 for four, 120 for five.
    if math.factorial(len(players)) <= limit:
        return list(permutations(players))
    found: list[Order] = []
    while len(found) < limit:
        order = tuple(draw.sample(list(players), len(players)))  # uniform; an order may come twice
        found += [order, order[::-1]]
    return found[:limit]


def coalitions_of(orders: Sequence[Order]) -> list[Replaced]:
    """Return the replaced players of each coalition whose worth :func:`shapley` asks for, but not the run as it was.

    Each comes once, however many orders pass through it: n players have at most 2^n - 1.
    """
    # The players not yet in are a suffix of the order. The empty suffix is the recorded run, whose worth is known.
    found = dict.fromkeys(frozenset(order[start:]) for order in orders for start in range(len(order)))
    return list(found)
