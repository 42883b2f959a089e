"""When rewards count as fallen, and since when."""

import random

import pytest

from agl_learn.fall import FallDetector


def rewards_of(*parts: tuple[int, float], seed: int) -> list[float]:
    """Rewards of 0 and 1, in parts with another mean each."""
    chance = random.Random(seed)
    return [float(chance.random() < mean) for count, mean in parts for _ in range(count)]


def read(rewards: list[float]) -> tuple[int, float]:
    """The number of the reward with the alarm, -1 without one, and the time at which the fall began."""
    detector = FallDetector()
    for number, reward in enumerate(rewards):
        detector.add(reward, at=float(number))
        if detector.has_fallen:
            return number, detector.since
    return -1, 0.0


@pytest.mark.parametrize("seed", range(20))
def test_steady_rewards_raise_no_alarm(seed: int) -> None:
    assert (-1, 0.0) == read(rewards_of((1000, 0.85), seed=seed))


@pytest.mark.parametrize("seed", range(20))
def test_fall_is_noticed_soon_and_dated(seed: int) -> None:
    noticed, since = read(rewards_of((700, 0.85), (300, 0.3), seed=seed))

    assert 700 < noticed < 740
    assert abs(since - 700) <= 15


def test_slow_decline_is_noticed() -> None:
    chance = random.Random(1)

    noticed, _ = read([float(chance.random() < 0.9 - n / 2000) for n in range(1500)])

    assert noticed > 0


def test_rise_raises_no_alarm() -> None:
    assert (-1, 0.0) == read(rewards_of((300, 0.3), (700, 0.8), seed=1))


def test_difficult_kind_that_becomes_frequent_is_no_fall() -> None:
    detector, chance = FallDetector(), random.Random(1)

    for number in range(1500):
        is_hard = number > 500 and chance.random() < 0.8
        detector.add(float(chance.random() < (0.3 if is_hard else 0.9)), at=float(number), kind=f"hard {is_hard}")

    assert not detector.has_fallen
