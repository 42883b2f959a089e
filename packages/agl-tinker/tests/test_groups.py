"""The groups of a step: silent ones are replaced, and tasks are drawn as the algorithms with torch draw them."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agl.contracts import Collected
from agl.errors import ConfigError, RunError
from agl.schemas import Episode, Transition
from agl_objectives.groups import GroupSampler as TheirSampler
from agl_objectives.groups import Silence
from agl_testing.conformance.bench import AlgorithmBench, AlgorithmScenario, RolloutOrder
from agl_tinker.algorithm import Tinker
from agl_tinker.groups import GroupSampler, StepGroups

COUNT, N, TASKS = 4, 2, 24


def play(order: RolloutOrder) -> Episode:
    """Reward the second rollout of a task of an even number, and both of the others."""
    rollout = order.rollout
    sample = int(rollout.rollout_id.rsplit("-", 1)[1])
    reward = float(sample % 2) if rollout.task["n"] % 2 == 0 else 1.0
    call = Transition(rollout_id=rollout.rollout_id, attempt_id=rollout.attempt_id, span_id=f"{rollout.rollout_id}/0")
    return Episode(rollout=rollout, attempt=None, reward=reward, transitions=(call,))


def is_silent(group: Sequence[Episode]) -> bool:
    return len({episode.reward for episode in group}) == 1


def bench_of(folder: Path) -> AlgorithmBench:
    train = [{"n": number} for number in range(TASKS)]
    scenario = AlgorithmScenario(make=lambda: Tinker(), play=play, tunes=(), train=train)
    return AlgorithmBench(scenario, folder)


def sampler(bench: AlgorithmBench, **options: Any) -> GroupSampler:
    made = GroupSampler(
        **{"count": COUNT, "n": N, "refill": 0, "curriculum": "", "uniform": 0.5, "is_silent": is_silent, **options}
    )
    made.begin(bench.context())
    return made


def tasks_of(groups: Sequence[Sequence[Episode]]) -> list[int]:
    return [group[0].rollout.task["n"] for group in groups]


def test_silent_groups_are_replaced_named_and_counted(tmp_path: Path) -> None:
    found = asyncio.run(sampler(bench_of(tmp_path), refill=10).collect(1))
    assert COUNT == len(found.groups)
    assert {0} == {number % 2 for number in tasks_of(found.groups)}
    assert {1} == {episode.rollout.task["n"] % 2 for episode in found.replaced}
    replaced = len(found.replaced) / N
    assert found.metrics["groups_dropped"] == found.metrics["groups_silent"] == replaced > 0
    assert (0.0, replaced * N) == (found.metrics["groups_missing"], found.metrics["rollouts_extra"])


def test_rounds_are_bounded_and_a_step_of_silent_groups_keeps_its_own(tmp_path: Path) -> None:
    made = sampler(bench_of(tmp_path), refill=2, is_silent=lambda group: True)
    first = made.first(1)
    found = asyncio.run(made.collect(1))
    assert first == tasks_of(found.groups)
    assert (2.0, 2 * COUNT * N) == (found.metrics["refill_rounds"], found.metrics["rollouts_extra"])


def test_a_round_without_a_usable_rollout_is_counted_and_ends_nothing(tmp_path: Path) -> None:
    bench = bench_of(tmp_path)
    context = bench.context()

    async def collect(tasks: Sequence[Any], *, key: str = "", **request: Any) -> Collected:
        if key:
            raise RunError("none can be used")
        return await bench.collect(tasks, key=key, **request)

    object.__setattr__(context, "collect", collect)
    made = sampler(bench, refill=1)
    made.begin(context)
    found = asyncio.run(made.collect(1))
    assert found.dropped["unusable"] == found.metrics["rollouts_extra"] > 0


@pytest.mark.parametrize("curriculum", ["frontier", "unsolved"])
def test_tasks_and_metrics_are_those_of_the_algorithms_with_torch(tmp_path: Path, curriculum: Any) -> None:
    one, two = bench_of(tmp_path / "one"), bench_of(tmp_path / "two")
    ours = sampler(one, refill=2, curriculum=curriculum)

    async def is_equal(group: Sequence[Episode]) -> bool:
        return is_silent(group)

    silence = Silence(of=is_equal, note="equal")
    theirs = TheirSampler("grpo", count=COUNT, n=N, refill=2, curriculum=curriculum, silence=silence)
    theirs.begin(two.context())
    for step in range(1, 9):
        mine, other = asyncio.run(ours.collect(step)), asyncio.run(theirs.collect(step))
        assert tasks_of(other.groups) == tasks_of(mine.groups)
        assert {name: other.metrics[name] for name in mine.metrics} == pytest.approx(mine.metrics, rel=1e-6)
    assert set(two.collected) == set(one.collected)


def test_a_restored_curriculum_draws_what_the_saved_one_would(tmp_path: Path) -> None:
    bench = bench_of(tmp_path)
    one = sampler(bench, refill=1, curriculum="frontier")
    for step in (1, 2, 3):
        asyncio.run(one.collect(step))
    two = sampler(bench, refill=1, curriculum="frontier")
    two.restore(json.loads(json.dumps(one.state())))

    def drawn(found: StepGroups) -> list[int]:
        return tasks_of(found.groups)

    assert drawn(asyncio.run(one.collect(4))) == drawn(asyncio.run(two.collect(4)))
    blank = sampler(bench, curriculum="frontier")
    assert blank.first(5) != one.first(5), "what is known makes a difference"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"refill": -1}, "refill = -1; give the most rounds"),
        ({"curriculum": "fronteer"}, "curriculum = 'fronteer'.*'frontier'"),
        ({"curriculum_uniform": 0.2}, "curriculum_uniform = 0.2; give a share"),
        ({"curriculum": "frontier", "curriculum_uniform": 0.0}, "curriculum_uniform = 0.0; give a share"),
    ],
)
def test_settings_that_cannot_work_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Tinker(**params)
