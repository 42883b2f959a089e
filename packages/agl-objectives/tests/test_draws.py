"""A step draws no task twice, all tasks are drawn equally often, and a repeated step draws the same tasks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from agl_objectives.tasks import draw_places
from agl_testing.conformance import AlgorithmScenario
from agl_testing.conformance.bench import AlgorithmBench

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 25


def draws(workdir: Path, *, tasks: int, count: int) -> list[list[int]]:
    train = [{"n": number} for number in range(tasks)]
    scenario = AlgorithmScenario(make=lambda: None, play=lambda order: None, tunes=(), train=train)  # type: ignore[arg-type,return-value]  # the bench makes no algorithm here
    context = AlgorithmBench(scenario, workdir).context()
    return [draw_places(context, step=step, count=count) for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("tasks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 16])
def test_no_task_comes_twice_in_a_step_or_before_every_other_came(tmp_path: Path, tasks: int, count: int) -> None:
    steps = draws(tmp_path, tasks=tasks, count=count)
    assert [min(count, tasks)] * STEPS == [len(set(step)) for step in steps]
    assert [min(count, tasks)] * STEPS == [len(step) for step in steps]
    drawn = [task for step in steps for task in step]
    for stop in range(1, len(drawn) + 1):
        times = Counter(drawn[:stop])
        assert max(times.values()) - min(times[task] for task in range(tasks)) <= 1


def test_epochs_are_shuffled_anew(tmp_path: Path) -> None:
    steps = draws(tmp_path, tasks=8, count=8)
    assert len({tuple(step) for step in steps}) > 20
