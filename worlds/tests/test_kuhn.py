"""Kuhn poker: equilibria cannot be exploited, best responses are those of a search, and agents learn."""

import random
from itertools import product

import pytest

from worlds.kuhn import DEALS, VALUE, Policy, exploitability, mixture, payoff, plan, value

HALF = [[0.5] * 3] * 2


def drawn(draw: random.Random) -> Policy:
    return [[draw.random() for _ in range(3)] for _ in range(2)]


def expected(first: Policy, second: Policy) -> float:
    """The first player's chips, by playing every deal and move out."""

    def follow(i: int, j: int, history: str) -> float:
        if history in ("pp", "pbp", "pbb", "bp", "bb"):
            return payoff(i, j, history)
        bet = {"": first[0][i], "pb": first[1][i], "p": second[0][j], "b": second[1][j]}[history]
        return bet * follow(i, j, history + "b") + (1 - bet) * follow(i, j, history + "p")

    return sum(follow(i, j, "") for i, j in DEALS) / 6


@pytest.mark.parametrize("bluffs", [0.0, 0.2, 1 / 3])
def test_equilibrium_cannot_be_exploited(bluffs: float) -> None:
    first = [[bluffs, 0.0, 3 * bluffs], [0.0, bluffs + 1 / 3, 1.0]]
    second = [[1 / 3, 0.0, 1.0], [0.0, 1 / 3, 1.0]]
    assert pytest.approx(0.0, abs=1e-12) == exploitability(plan(first), second)
    assert pytest.approx(VALUE) == value(plan(first), second)


def test_exploitability_is_that_of_the_best_of_all_pure_policies() -> None:
    draw = random.Random(0)
    pure: list[Policy] = [[moves[:3], moves[3:]] for moves in product((0.0, 1.0), repeat=6)]
    for _ in range(5):
        first, second = drawn(draw), drawn(draw)
        most = max(expected(other, second) for other in pure)
        least = min(expected(first, other) for other in pure)
        assert pytest.approx((most - least) / 2) == exploitability(plan(first), second)
        assert pytest.approx(expected(first, second)) == value(plan(first), second)


def test_mixture_plays_one_of_its_policies_for_a_whole_game() -> None:
    bold, shy = [[0.0] * 3, [1.0] * 3], [[1.0] * 3, [0.0] * 3]
    meek, second = [[0.0] * 3, [0.0] * 3], [[0.3, 0.6, 0.9], [0.2, 0.4, 0.8]]
    for firsts in ([bold, meek], [shy, bold]):
        played = sum(expected(first, second) for first in firsts) / 2
        assert pytest.approx(played) == value(*mixture(firsts, [second]))
    # The mean of behaviours calls half of the time after a pass; a player who passes first is the bold one and calls.
    assert (0.5, 0.5, 0.0) == mixture([shy, bold], [second])[0][0]


def test_agents_learn_against_each_other() -> None:
    pytest.importorskip("torch")
    from benchmarks.bench_kuhn import train

    found = train(0, steps=12)
    assert 12 == len(found.firsts) == len(found.seconds)
    first, last = (exploitability(plan(found.firsts[at]), found.seconds[at]) for at in (0, -1))
    assert last < 0.8 * first


def test_agents_in_turns_meet_earlier_versions_only_in_a_league() -> None:
    pytest.importorskip("torch")
    from benchmarks.bench_kuhn import train

    live, newest, drawn_of_three = (train(0, steps=3, in_turns=True, league=size).firsts for size in (0, 1, 3))
    assert live == newest  # the newest version is the live one
    assert live != drawn_of_three
