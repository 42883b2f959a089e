"""Kuhn poker, whose equilibria are known: a game of two players with three cards and twelve information sets.

Each antes one chip and gets one of the cards J, Q and K. The first player bets a chip or passes; after a pass the
second may bet too; who faces a bet calls it or gives up. The higher card wins. In every equilibrium the first player
wins -1/18 chips on average; there is one for each share from 0 to 1/3 of the jacks that it bets (Kuhn 1950).

A policy is the probabilities of a bet or a call, ``[2, 3]`` by situation and card. The situations of the first player
are the first move and an answer to a bet; those of the second follow a pass and a bet.
"""

from collections.abc import Sequence
from itertools import permutations

CARDS = "JQK"
DEALS = tuple(permutations(range(3), 2))
"""The cards of the first and of the second player; all are equally likely."""

SITUATIONS = (("", "pb"), ("p", "b"))
"""The moves before each player decides, for the first and the second player: ``p`` is a pass, ``b`` a bet."""

ENDS = ("pp", "pbp", "pbb", "bp", "bb")
"""The moves of whole games."""

VALUE = -1 / 18
"""The chips that the first player wins on average in every equilibrium."""

Policy = Sequence[Sequence[float]]
Plan = tuple[tuple[float, float, float], ...]
"""The first player's probabilities of a bet, of a pass and a call, and of two passes, by card."""


def payoff(first: int, second: int, history: str) -> float:
    """Return the chips that the first player wins after a whole game, such as ``pbp``."""
    won = 1.0 if first > second else -1.0
    if history in ("bb", "pbb"):
        return 2.0 * won
    return {"bp": 1.0, "pbp": -1.0}.get(history, won)


def plan(first: Policy) -> Plan:
    """Return the realisation plan of a first player's policy."""
    return tuple((bet, (1 - bet) * call, (1 - bet) * (1 - call)) for bet, call in zip(*first, strict=True))


def mixture(firsts: Sequence[Policy], seconds: Sequence[Policy]) -> tuple[Plan, Policy]:
    """Return the players who draw one of their policies for a whole game, each equally often.

    A mean of plans is such a player, and a mean of behaviours is not. For the second player both are the same, because
    it moves once.
    """
    plans = [plan(first) for first in firsts]
    mixed = [tuple(_mean([one[card][way] for one in plans]) for way in range(3)) for card in range(3)]
    second = [[_mean([one[at][card] for one in seconds]) for card in range(3)] for at in range(2)]
    return tuple((bet, call, fold) for bet, call, fold in mixed), second


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def value(first: Plan, second: Policy) -> float:
    """Return the chips that the first player wins on average."""
    return sum(_bet(i, j, first, second[1][j]) + _pass(i, j, first, second[0][j]) for i, j in DEALS) / len(DEALS)


def _bet(i: int, j: int, first: Plan, call: float) -> float:
    """Return the chips of the first player in games that it opens with a bet, weighed by its plan."""
    return first[i][0] * (call * payoff(i, j, "bb") + (1 - call) * payoff(i, j, "bp"))


def _pass(i: int, j: int, first: Plan, bet: float) -> float:
    """Return the same for games that it opens with a pass."""
    answered = first[i][1] * payoff(i, j, "pbb") + first[i][2] * payoff(i, j, "pbp")
    return bet * answered + (1 - bet) * (first[i][1] + first[i][2]) * payoff(i, j, "pp")


def exploitability(first: Plan, second: Policy) -> float:
    """Return the chips that a best response wins beyond what is due, as the mean of both sides; 0 in an equilibrium."""
    # The second player answers per card and situation; the first picks one of three plans per card.
    least = sum(
        min(sum(game(i, j, first, move) for i, k in DEALS if k == j) for move in (0.0, 1.0))
        for j in range(3)
        for game in (_bet, _pass)
    )
    pure: list[Plan] = [((1.0, 0.0, 0.0),) * 3, ((0.0, 1.0, 0.0),) * 3, ((0.0, 0.0, 1.0),) * 3]
    most = sum(
        max(
            sum(_bet(i, j, way, second[1][j]) + _pass(i, j, way, second[0][j]) for k, j in DEALS if k == i)
            for way in pure
        )
        for i in range(3)
    )
    return (most - least) / len(DEALS) / 2
