import math
import random
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl.acceptance import BETS, Gate, error_for, mean_interval
from agl.errors import ConfigError

PAIRS = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=60)


def fed(pairs: Sequence[tuple[float, float]], **options: Any) -> Gate:
    gate = Gate(**options)
    for old, new in pairs:
        gate.update(old, new)
    return gate


def drawn(chance: random.Random, *, old: float, new: float) -> tuple[float, float]:
    """Return whether the old version succeeds at a task, and whether the new one does."""
    return float(chance.random() < old), float(chance.random() < new)


def test_gate_finds_a_gain_in_pairs() -> None:
    chance, gate = random.Random(1), Gate()
    while gate.update(*drawn(chance, old=0.6, new=0.8)) == "open":
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


def test_equal_versions_need_no_number_of_differences() -> None:
    gate = fed([(0.5, 0.5), (0.5, 0.5 + 1e-300)])

    assert (None, "open", 1.0) == (gate.needed, gate.verdict, gate.evidence)
    assert None is Gate().needed


@pytest.mark.parametrize(("gain", "seed"), [(0.15, 1), (0.10, 2)])
def test_estimate_of_the_needed_differences_is_about_right(gain: float, seed: int) -> None:
    """An estimate after 200 pairs is within a factor of 2 of the median number of pairs that led to the verdict."""
    chance = random.Random(seed)
    taken, estimated = list[int](), list[float]()
    for _ in range(60):
        gate, decided = Gate(), 0
        while not decided or gate.count < 200:
            if gate.update(*drawn(chance, old=0.6, new=0.6 + gain)) != "open":
                decided = decided or gate.count
            if gate.count == 200:
                estimated.append(gate.needed or math.inf)
        taken.append(decided)

    assert 0.5 < median(estimated) / median(taken) < 2


def test_shares_of_an_error_add_up_to_it() -> None:
    assert 0.0499 < sum(error_for(number, error=0.05) for number in range(1, 10_000)) < 0.05


@pytest.mark.parametrize("rewards", [(0.0, 7.0), (math.nan, 0.5), (0.5, math.inf), (math.inf, math.inf)])
def test_gate_refuses_rewards_beyond_its_span(rewards: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="span"):
        Gate().update(*rewards)


@pytest.mark.parametrize("options", [{"error": 0.0}, {"error": 1.0}, {"span": 0.0}, {"gain": 1.0}, {"gain": -2.0}])
def test_gate_refuses_numbers_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="a gate needs"):
        Gate(**options)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_split_without_two_arms_compares_nothing(share: float) -> None:
    with pytest.raises(ConfigError, match="compares nothing"):
        Gate().arrive(1.0, is_new=True, share=share)


@given(PAIRS, st.floats(-0.5, 0.5), st.randoms())
def test_order_of_pairs_does_not_change_the_evidence(
    pairs: list[tuple[float, float]], gain: float, chance: random.Random
) -> None:
    one, other = fed(pairs, gain=gain), fed(chance.sample(pairs, len(pairs)), gain=gain)

    assert one.evidence == pytest.approx(other.evidence, rel=1e-9)
    assert one.evidence_of_harm == pytest.approx(other.evidence_of_harm, rel=1e-9)


@given(PAIRS, st.floats(-0.5, 0.5), st.sampled_from([0.01, 0.5, 8.0, 1000.0]))
def test_evidence_does_not_depend_on_the_unit_of_rewards(
    pairs: list[tuple[float, float]], gain: float, span: float
) -> None:
    plain = fed(pairs, gain=gain)
    scaled = fed([(span * old, span * new) for old, new in pairs], gain=span * gain, span=span)

    assert plain.evidence == pytest.approx(scaled.evidence, rel=1e-6)
    assert plain.mean * span == pytest.approx(scaled.mean, abs=1e-9 * span)
    assert [plain.lower * span, plain.upper * span] == pytest.approx([scaled.lower, scaled.upper], abs=1e-4 * span)


@given(PAIRS)
def test_bounds_hold_the_mean_and_agree_with_the_evidence(pairs: list[tuple[float, float]]) -> None:
    gate = fed(pairs)

    assert gate.lower - 1e-4 <= gate.mean <= gate.upper + 1e-4
    assert gate.mean == pytest.approx(fmean(new - old for old, new in pairs))
    below, above = (fed(pairs, gain=min(0.999, max(-0.999, gate.lower + by))) for by in (-0.001, 0.001))
    if gate.lower > -0.99:
        assert below.evidence >= 20 > above.evidence


@given(PAIRS)
def test_exchanged_versions_exchange_the_evidence(pairs: list[tuple[float, float]]) -> None:
    one, other = fed(pairs), fed([(new, old) for old, new in pairs])

    assert (one.evidence, one.evidence_of_harm) == (other.evidence_of_harm, other.evidence)
    assert one.lower == pytest.approx(-other.upper, abs=1e-4)


def wealth_by_ville(differences: Sequence[float], gain: float) -> float:
    """Return the mean wealth of the bets, computed by the library `ville`.

    Its bets depend on the variance so far, but are at most c. With a tiny alpha they all want to be larger, so each is
    exactly c.
    """
    sequential = pytest.importorskip("ville.sequential", reason="needs ville, which nox -s engine installs")
    tests = [
        sequential.BettingTest((1 + gain) / 2, bounds=(0, 1), alternative="greater", alpha=1e-300, c=bet)
        for bet in BETS
    ]
    return fmean(float(test.fit([(1 + d) / 2 for d in differences]).e_values_[-1]) for test in tests)


@pytest.mark.parametrize("gain", [0.0, 0.1])
def test_evidence_of_pairs_is_that_of_an_independent_implementation(gain: float) -> None:
    chance = random.Random(3)
    pairs = [(chance.random(), min(1.0, 0.15 + chance.random())) for _ in range(150)]

    gate = fed(pairs, gain=gain)

    assert gate.evidence == pytest.approx(wealth_by_ville([new - old for old, new in pairs], gain), rel=1e-9)
    assert gate.evidence_of_harm == pytest.approx(wealth_by_ville([old - new for old, new in pairs], 0.0), rel=1e-9)


def test_evidence_of_a_split_is_that_of_an_independent_implementation() -> None:
    chance, gate = random.Random(4), Gate()
    differences, old = list[float](), list[float]()
    for number in range(150):
        share = 0.1 if number < 50 else 0.5 if number < 100 else 0.8
        is_new, reward = chance.random() < share, chance.random()
        gate.arrive(reward, is_new=is_new, share=share)
        centre = fmean(old) if old else reward
        inverse = 1 / share if is_new else -1 / (1 - share)
        differences.append((reward - centre) * inverse * min(share, 1 - share))
        old += [] if is_new else [reward]

    assert gate.evidence == pytest.approx(wealth_by_ville(differences, 0.0), rel=1e-9)
    assert gate.evidence_of_harm == pytest.approx(wealth_by_ville([-d for d in differences], 0.0), rel=1e-9)


def wrong_verdicts(seed: int, *, runs: int, clustered: bool = False, late: bool = False) -> int:
    """Count the gates that call one of two equal versions better; each gate is asked after each of 100 users."""
    chance, wrong = random.Random(seed), 0
    for _ in range(runs):
        gate, waiting = Gate(), list[tuple[float, float, bool]]()
        for time in range(100):
            usual = chance.choice([0.1, 0.9]) if clustered else 0.5
            reward = fmean(float(chance.random() < usual) for _ in range(10 if clustered else 1))
            delay = chance.expovariate(0.5 if reward < 0.5 else 0.05) if late else 0.0  # complaints come first
            waiting.append((time + delay, reward, chance.random() < 0.2))
        for _, reward, is_new in sorted(waiting):
            gate.arrive(reward, is_new=is_new, share=0.2)
        wrong += gate.verdict == "better"
    return wrong


@pytest.mark.parametrize("case", [{}, {"clustered": True}, {"late": True}], ids=["plain", "clustered", "late"])
def test_equal_versions_are_rarely_called_better_however_often_one_looks(case: dict[str, bool]) -> None:
    # At 5 %, more than 25 of 300 have a probability below 1 %.
    assert wrong_verdicts(5, runs=300, **case) <= 25


def test_interval_of_a_range_of_one_number_is_that_number() -> None:
    assert (2.0, 2.0) == mean_interval([2.0, 2.0], low=2.0, high=2.0)
