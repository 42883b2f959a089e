"""A crew of five: the exact reward is that of all answers, and updates in turns do not make the team fall."""

from itertools import pairwise, product
from math import log, prod

import pytest

pytest.importorskip("torch")

from benchmarks.bench_crew import fall, train
from worlds.crew import expected_reward


def test_expected_reward_is_the_mean_over_all_answers() -> None:
    # Chances of 1/2, 2/3, 3/4, 4/5 and 5/6 of a yes.
    odds = [1.0, 2.0, 3.0, 4.0, 5.0]
    logits = [log(odd) for odd in odds]
    expected = sum(
        prod(odd / (1 + odd) if said else 1 / (1 + odd) for odd, said in zip(odds, answers, strict=True))
        * sum(one == other for one, other in pairwise(answers))
        / 4
        for answers in product((True, False), repeat=5)
    )
    assert pytest.approx(expected) == expected_reward([{"": logit} for logit in logits])


def test_crew_in_turns_does_not_fall_where_training_together_does() -> None:
    turns, together = (train(0, rounds=2, is_in_turns=is_in_turns) for is_in_turns in (True, False))
    assert 11 == len(turns) == len(together)
    assert fall(turns) < 0.02 < fall(together)
    assert turns[-1] > turns[0] + 0.2
