import random

import pytest

from agl.acceptance import Gate, error_for
from agl.errors import ConfigError


def test_gate_finds_a_gain_in_pairs() -> None:
    chance, gate = random.Random(1), Gate()
    while gate.update(float(chance.random() < 0.6), float(chance.random() < 0.8)) == "open":
        pass

    assert "better" == gate.verdict
    assert 20 <= gate.evidence
    assert 0 < gate.lower <= gate.mean <= gate.upper


def test_gate_finds_harm_in_a_small_share_of_the_traffic() -> None:
    chance, gate = random.Random(1), Gate()
    verdict = "open"
    while verdict == "open" and gate.count < 1000:
        is_new = chance.random() < 0.1
        verdict = gate.arrive(float(chance.random() < (0.5 if is_new else 0.8)), is_new=is_new, share=0.1)

    assert "worse" == verdict


def test_gate_says_how_many_differences_would_do() -> None:
    gate = Gate(budget=20)
    for number in range(20):
        gate.update(float(number % 4 > 1), float(number % 4 > 0 or number > 17))

    assert "undecidable" == gate.verdict
    assert "would do" in gate.words


def test_shares_of_an_error_add_up_to_it() -> None:
    assert 0.0499 < sum(error_for(number, error=0.05) for number in range(1, 10_000)) < 0.05


def test_gate_refuses_rewards_beyond_its_span() -> None:
    with pytest.raises(ConfigError, match="span"):
        Gate().update(0.0, 7.0)
