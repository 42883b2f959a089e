"""Groups that are carried over between steps: the order in which they are taken, their age, and restarts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl.errors import RunError
from agl.schemas import Episode
from agl_algo_verl.rows.supply import VerlSupply, task_at
from agl_algo_verl.settings.settings import read_settings
from agl_testing.conformance import AlgorithmConformance, AlgorithmScenario
from agl_testing.conformance.bench import AlgorithmBench

from .test_inproc import train
from .world import config, scenario

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from agl.schemas import Json
    from agl_testing.conformance.bench import RolloutOrder

ASYNC: dict[str, Any] = {"trainer.v1.trainer_mode": "colocate_async"}
STEPS, SIZE = 4, 2


def keys(*, strategy: str, ahead: int, threshold: int) -> dict[str, Any]:
    return {
        **ASYNC,
        "trainer.v1.colocate_async.num_warmup_batches": ahead,
        "trainer.v1.sampler": {"max_off_policy_threshold": threshold, "max_off_policy_strategy": strategy},
    }


class Town:
    """A world in which each group takes a given number of turns of the event loop; a long one never ends."""

    def __init__(self, folder: Path, turns: Sequence[int] = ()) -> None:
        self.turns = list(turns)
        self.bench = AlgorithmBench(
            AlgorithmScenario(make=lambda: None, play=self.play, tunes=(), train=[{"n": i} for i in range(5)]),  # type: ignore[arg-type,return-value]
            folder,
        )

    async def play(self, order: RolloutOrder) -> Episode:
        number = int(order.rollout.rollout_id.split("group")[1].split("-")[0])
        for _ in range(self.turns[number] if number < len(self.turns) else 0):
            await asyncio.sleep(0)
        return Episode(rollout=order.rollout, attempt=None, reward=1.0)

    def supply(self, state: Mapping[str, Json] | None = None, **options: Any) -> VerlSupply:
        read = read_settings(config(**keys(**options)))[0]
        supply = VerlSupply(self.bench.context(), read, steps=STEPS)
        if state is not None:
            supply.restore(state)
        return supply


def numbers(groups: Sequence[Sequence[Episode]]) -> list[int]:
    return [int(group[0].rollout.rollout_id.split("group")[1].split("-")[0]) for group in groups]


def test_a_step_takes_the_first_that_finish_and_carries_the_others_over(tmp_path: Path) -> None:
    async def body() -> list[list[int]]:
        town = Town(tmp_path, turns=[40, 0, 0, 0])
        supply = town.supply(strategy="drop", ahead=1, threshold=8)
        first = await supply.take(1)
        assert 2.0 == first.metrics["groups_carried"]
        taken = [numbers(first.groups)]
        for step in (2, 3, 4):
            await asyncio.sleep(0)
            taken.append(numbers((await supply.take(step)).groups))
        await supply.close()
        return taken

    taken = asyncio.run(body())
    assert [1, 2] == taken[0]
    assert sorted(range(STEPS * SIZE)) == sorted(number for step in taken for number in step)


def test_what_finishes_too_late_is_dropped_counted_and_replaced(tmp_path: Path) -> None:
    async def body() -> tuple[list[list[int]], list[float]]:
        town = Town(tmp_path, turns=[3, 0, 0, 0, 0, 0, 9, 9, 9])
        supply = town.supply(strategy="drop", ahead=1, threshold=2)
        taken = [numbers((await supply.take(1)).groups), numbers((await supply.take(2)).groups)]
        for _ in range(20):
            await asyncio.sleep(0)  # group 0 finishes now, when a third version is live
        third = await supply.take(3)
        fourth = await supply.take(4)
        await supply.close()
        return [*taken, numbers(third.groups), numbers(fourth.groups)], [third.metrics["groups_stale"]]

    taken, stale = asyncio.run(body())
    assert ([[1, 2], [3, 4]], [1.0]) == (taken[:2], stale)
    assert sorted([*range(1, STEPS * SIZE), STEPS * SIZE]) == sorted(number for step in taken for number in step)


def test_waiting_takes_groups_in_the_order_in_which_they_were_asked_for(tmp_path: Path) -> None:
    async def body() -> list[list[int]]:
        supply = Town(tmp_path, turns=[9, 0, 5, 0]).supply(strategy="wait", ahead=2, threshold=3)
        return [numbers((await supply.take(step)).groups) for step in range(1, STEPS + 1)]

    assert [[0, 1], [2, 3], [4, 5], [6, 7]] == asyncio.run(body())


@settings(max_examples=20)
@given(
    turns=st.lists(st.integers(0, 30), min_size=10, max_size=10),
    strategy=st.sampled_from(["drop", "wait"]),
    ahead=st.integers(1, 3),
    slack=st.integers(0, 2),
    restarts=st.sets(st.integers(1, STEPS - 1)),
    lost=st.sets(st.integers(1, STEPS - 1)),
)
def test_nothing_is_trained_twice_lost_or_too_old_over_restarts(
    tmp_path_factory: pytest.TempPathFactory,
    turns: list[int],
    strategy: str,
    ahead: int,
    slack: int,
    restarts: set[int],
    lost: set[int],
) -> None:
    options: dict[str, Any] = {"strategy": strategy, "ahead": ahead, "threshold": ahead + 1 + slack}

    async def body() -> None:
        town = Town(tmp_path_factory.mktemp("town"), turns)
        supply = town.supply(**options)
        trained: list[int] = []
        stale = 0.0
        for step in range(1, STEPS + 1):
            before = supply.state()
            if step in lost:  # the process dies in this step, which is repeated from the state before it
                await supply.take(step)
                await supply.close()
                supply = town.supply(before, **options)
            found = await supply.take(step)
            assert SIZE == len(found.groups)
            assert found.metrics["staleness_max"] <= options["threshold"] - 1
            trained += numbers(found.groups)
            stale += found.metrics["groups_stale"]
            if step in restarts:
                state = supply.state()
                await supply.close()
                supply = town.supply(state, **options)
        await supply.close()
        assert STEPS * SIZE == len(set(trained)) == len(trained)
        assert STEPS * SIZE + stale == supply.state()["asked"]
        assert [] == supply.state()["pending"]

    asyncio.run(body())


@pytest.mark.parametrize("strategy", ["drop", "wait"])
def test_groups_from_before_a_run_went_back_are_dropped_and_replaced(strategy: str, tmp_path: Path) -> None:
    async def body() -> tuple[list[list[int]], list[float]]:
        supply = Town(tmp_path).supply(strategy=strategy, ahead=1, threshold=2)
        found = [await supply.take(1)]
        supply.go_back(step=1)
        found += [await supply.take(step) for step in range(2, STEPS + 1)]
        return [sorted(numbers(each.groups)) for each in found], [each.metrics["groups_stale"] for each in found]

    assert ([[0, 1], [4, 5], [6, 7], [8, 9]], [0.0, 2.0, 0.0, 0.0]) == asyncio.run(body())


def test_a_batch_of_unusable_groups_ends_the_run_and_single_ones_are_replaced(tmp_path: Path) -> None:
    async def body(broken: set[int]) -> dict[str, float]:
        town = Town(tmp_path)
        played = town.play

        async def play(order: RolloutOrder) -> Episode:
            episode = await played(order)
            if any(f"group{number}-" in order.rollout.rollout_id for number in broken):
                raise RunError("none of 4 rollouts can be used")
            return episode

        town.bench = AlgorithmBench(
            AlgorithmScenario(make=lambda: None, play=play, tunes=(), train=town.bench.scenario.train),  # type: ignore[arg-type,return-value]
            tmp_path,
        )
        supply = town.supply(strategy="drop", ahead=1, threshold=2)
        try:
            return (await supply.take(1)).metrics
        finally:
            await supply.close()

    assert 1.0 == asyncio.run(body({0}))["groups_unusable"]
    with pytest.raises(RunError, match="none of 4"):
        asyncio.run(body({0, 1}))


def test_every_task_comes_once_before_one_comes_again(tmp_path: Path) -> None:
    context = Town(tmp_path).bench.context()
    first, second = ([task_at(context, i)["n"] for i in range(5 * e, 5 * e + 5)] for e in (0, 1))
    assert [list(range(5))] * 2 == [sorted(first), sorted(second)]


def test_training_goes_on_with_groups_of_the_version_before(model_dir: Path, tmp_path: Path) -> None:
    more = {"trainer.total_training_steps": 6, "rollout.n": 16, "actor.optim.lr": 2e-2}
    more |= {"algorithm.rollout_correction.rollout_is": "token"}
    metrics, _ = train(tmp_path, model_dir, **more, **ASYNC)
    assert [0.0, 1.0, 1.0, 1.0, 1.0, 1.0] == [m["staleness"] for m in metrics]
    assert [2.0, 2.0, 2.0, 2.0, 2.0, 0.0] == [m["groups_carried"] for m in metrics]
    assert metrics[-1]["reward"] > metrics[0]["reward"] + 0.1, [m["reward"] for m in metrics]
    assert metrics[0]["logprob_gap"] < 1e-5 < metrics[2]["logprob_gap"]


def test_carried_groups_survive_a_restart(model_dir: Path, tmp_path: Path) -> None:
    kit = AlgorithmConformance()
    world = scenario(model_dir, **ASYNC)
    kit.test_resumed_run_does_what_an_uninterrupted_one_does(world, tmp_path / "resumed")
    kit.test_step_that_was_lost_is_repeated_from_the_state_before_it(world, tmp_path / "lost")
