"""Steps are saved by number, by time, or by the share of time that saving takes."""

from __future__ import annotations

import pytest

from agl.errors import ConfigError
from agl_objectives.saving import SaveInterval


class Clock:
    """A clock whose seconds a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def steps_saved(every: int | str, *, steps: int, step_s: float, cost_s: float = 0.0) -> list[int]:
    """Return the steps of a run that are saved."""
    clock = Clock()
    interval = SaveInterval("grpo", every, clock=clock)
    found: list[int] = []
    for step in range(1, steps + 1):
        clock.now += step_s
        interval.stepped()
        if interval.is_due():
            clock.now += cost_s
            interval.saved(cost_s)
            found.append(step)
    return found


def test_steps_are_counted_from_the_last_save() -> None:
    assert [1, 2, 3] == steps_saved(1, steps=3, step_s=1)
    assert [3, 6] == steps_saved(3, steps=8, step_s=1)


@pytest.mark.parametrize(("every", "expected"), [("60s", [2, 4, 6]), ("1.5m", [3, 6]), ("0.05h", [6])])
def test_time_counts_from_the_last_save(every: str, expected: list[int]) -> None:
    assert expected == steps_saved(every, steps=7, step_s=30)


def test_share_saves_the_first_step_and_then_spends_no_more_of_the_time_than_that() -> None:
    saved = steps_saved("5%", steps=100, step_s=1, cost_s=0.5)
    assert [1, 11, 21] == saved[:3]
    assert [*range(1, 101)] == steps_saved("5%", steps=100, step_s=1, cost_s=0.01)
    cost = 4 * len(steps_saved("20%", steps=400, step_s=1, cost_s=4))
    assert 0.18 < cost / (400 + cost) < 0.21


@pytest.mark.parametrize(
    "every", [0, -1, True, 1.5, "", "60", "0s", "-5s", "0%", "100%", "5 %%", "1d", f"{10**400}s", "[bold]5s", "\x1b[2J"]
)
def test_anything_else_is_refused_with_what_to_give(every: object) -> None:
    with pytest.raises(ConfigError, match=r"grpo got save_every = .*Give a number of steps .* such as \"5%\""):
        SaveInterval("grpo", every)  # type: ignore[arg-type]
