"""The replays of a step's rollouts for a counterfactual credit."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from agl.contracts import ReplayPlan, replay_of, trains
from agl.schemas import Episode, Mode, Rollout
from agl.stores import MemoryStore
from agl_run.parts.counterfactual import Replays


def replayed(*plans: ReplayPlan, run: str = "1", mode: Mode = "train", **metadata: Any) -> list[Rollout]:
    """Return the rollouts that replay the given plans; the ids of the recorded rollouts depend on ``run``."""
    asked: list[Rollout] = []

    async def run_all(rollouts: Sequence[Rollout]) -> list[Episode]:
        asked.extend(rollouts)
        return [Episode(rollout=rollout, attempt=None, reward=1.0) for rollout in rollouts]

    recorded = [
        Rollout(
            rollout_id=f"{name}-{run}",
            task={},
            mode=mode,
            status="succeeded",
            metadata={"step": 3, **metadata, **seed},
        )
        for name, seed in {"r": {"seed": 7}, "s": {"seed": 8}, "t": {"seed": 9}, "unseeded": {}}.items()
    ]
    episodes = [Episode(rollout=rollout, attempt=None, reward=1.0) for rollout in recorded]
    replays = Replays(episodes, prefix=f"replay-{run}-", run_all=run_all, store=MemoryStore())
    asyncio.run(replays(plans))
    return asked


def seeds(*plans: ReplayPlan, run: str = "1") -> list[Any]:
    return [rollout.metadata.get("seed") for rollout in replayed(*plans, run=run)]


def plans(run: str = "1") -> list[ReplayPlan]:
    silent = [ReplayPlan(rollout_id=f"r-{run}", replaced=("clerk",), sample=sample) for sample in range(3)]
    siblings = [
        ReplayPlan(rollout_id=f"r-{run}", replaced=("clerk",), how="sibling", sibling=f"{name}-{run}") for name in "st"
    ]
    return [*silent, *siblings]


def test_samples_of_one_plan_and_other_plans_draw_tokens_of_their_own() -> None:
    assert 5 + 1 == len({7, *seeds(*plans())})


def test_a_repeated_run_with_the_same_seed_replays_with_the_same_draws() -> None:
    assert seeds(*plans("1"), run="1") == seeds(*plans("2"), run="2")


def test_replay_of_a_rollout_without_a_seed_has_none() -> None:
    (rollout,) = replayed(ReplayPlan(rollout_id="unseeded-1", replaced=("clerk",)))
    assert {"step", "replay"} == set(rollout.metadata)


@pytest.mark.parametrize("mode", ["train", "val", "test"])
def test_replay_samples_as_the_rollout_that_it_replays(mode: Mode) -> None:
    """Sampling a replay from another distribution than the step's would bias the credit."""
    plan = ReplayPlan(rollout_id="r-1", replaced=("clerk",))
    (rollout,) = replayed(plan, mode=mode)

    assert ("test", mode == "train") == (rollout.mode, trains(rollout, "main"))
    assert replace(plan, mode=mode) == replay_of(rollout)


def test_mode_of_the_recorded_rollout_leaves_a_replays_id_and_seed() -> None:
    """A step that is repeated after an upgrade must find the replays that ran before the upgrade."""
    plan = ReplayPlan(rollout_id="r-1", replaced=("clerk",))
    (of_training,), (of_test,) = replayed(plan, mode="train"), replayed(plan, mode="test")

    assert (of_test.rollout_id, of_test.metadata["seed"]) == (of_training.rollout_id, of_training.metadata["seed"])
    assert "replay-1-4785" == of_training.rollout_id[:13]
