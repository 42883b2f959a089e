"""Shares in games whose worths are known in closed form."""

import math
import random
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_rewards.credit.counterfactual import coalitions_of, leave_one_out, orders_of, shapley

NAMES = ("a", "b", "c", "d", "e")
number = st.floats(-10, 10, allow_nan=False)
SMALL = settings(max_examples=60)


class Table:
    """A game with a given worth for every coalition, by replaced players; counts the requests."""

    def __init__(self, players, worths):
        self.players, self.worths, self.asked = players, worths, []

    def __call__(self, replaced):
        self.asked.append(replaced)
        return self.worths[sum(1 << self.players.index(player) for player in replaced)]


@st.composite
def games(draw, least=1):
    players = NAMES[: draw(st.integers(least, len(NAMES)))]
    worths = draw(st.lists(number, min_size=1 << len(players), max_size=1 << len(players)))
    return Table(players, worths)


@SMALL
@given(games(), st.integers(1, 12), st.integers(0, 5))
def test_shapley_shares_add_up_to_what_all_earn_beyond_nobody_however_few_orders(game, limit, seed):
    orders = orders_of(game.players, limit=limit, draw=random.Random(seed))
    shares = shapley(game.players, orders, game)
    surplus = game(frozenset()) - game(frozenset(game.players))
    assert math.isclose(surplus, math.fsum(shares.values()), abs_tol=1e-9)


@SMALL
@given(games())
def test_shapley_over_all_orders_is_the_value_by_its_definition(game):
    players = game.players
    shares = shapley(players, orders_of(players, limit=120, draw=random.Random(0)), game)
    for player in players:
        expected = 0.0
        for order in permutations(players):
            before = frozenset(order[: order.index(player)])
            others = frozenset(players) - before
            expected += game(others - {player}) - game(others)
        assert math.isclose(expected / math.factorial(len(players)), shares[player], abs_tol=1e-9)


@SMALL
@given(st.lists(number, min_size=1, max_size=5), number, st.integers(1, 9))
def test_both_give_every_player_of_an_additive_game_what_it_adds(added, base, limit):
    players = NAMES[: len(added)]

    def worth(replaced):
        return base + math.fsum(value for player, value in zip(players, added, strict=True) if player not in replaced)

    orders = orders_of(players, limit=limit, draw=random.Random(1))
    for shares in (leave_one_out(players, worth), shapley(players, orders, worth)):
        assert all(
            math.isclose(value, shares[player], abs_tol=1e-8) for player, value in zip(players, added, strict=True)
        )


@SMALL
@given(games(least=2))
def test_a_player_that_changes_nothing_gets_nothing(game):
    idle = game.players[0]

    def worth(replaced):
        return game(replaced - {idle})

    orders = orders_of(game.players, limit=7, draw=random.Random(2))
    assert leave_one_out(game.players, worth)[idle] == 0.0
    assert shapley(game.players, orders, worth)[idle] == 0.0


@pytest.mark.parametrize(("count", "limit", "expected"), [(3, 6, 6), (3, 24, 6), (4, 8, 8), (5, 7, 7), (1, 1, 1)])
def test_orders_are_all_of_them_or_as_many_as_asked(count, limit, expected):
    orders = orders_of(NAMES[:count], limit=limit, draw=random.Random(3))
    assert expected == len(orders)
    assert all(sorted(NAMES[:count]) == sorted(order) for order in orders)


def test_sampled_orders_come_with_their_reverse():
    orders = orders_of(NAMES, limit=6, draw=random.Random(4))
    assert [order[::-1] for order in orders[0::2]] == orders[1::2]


@SMALL
@given(games(), st.integers(1, 12))
def test_coalitions_are_what_shapley_asks_for_and_bounded(game, limit):
    orders = orders_of(game.players, limit=limit, draw=random.Random(5))
    shapley(game.players, orders, game)
    wanted = coalitions_of(orders)
    assert set(wanted) == set(game.asked) - {frozenset()}
    assert len(wanted) <= min(2 ** len(game.players) - 1, len(orders) * len(game.players))
