"""Rewards that compare the rollouts of a task: which groups they see, how they are stored, and repeated steps."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agl import AlgorithmEntry, PluginManager, Reward, Rollout, Span, hookimpl, semconv
from agl.algorithms import algorithm
from agl.contracts import AlgorithmContext, Collected, Recording, RolloutQuery, StepReport
from agl.errors import RewardError
from agl.schemas import PromptTemplate
from agl.stores import MemoryStore, read_recordings
from agl_run import Quiet, Trainer

TASKS = [{"n": 1}, {"n": 2}]


def said(spans: Sequence[Span]) -> float:
    return next(float(str(span.attributes[semconv.OUTPUT])) for span in spans if semconv.OUTPUT in span.attributes)


class Ranks:
    """Gives each rollout the number of rollouts that it beats, and keeps the groups that it saw."""

    def __init__(self, *, wrong: int = 0) -> None:
        self.groups: list[list[str]] = []
        self._wrong = wrong

    def __call__(self, rollout: Rollout, spans: Sequence[Span]) -> None: ...

    async def compare(self, group: Sequence[Recording]) -> Sequence[Reward]:
        self.groups.append([one.rollout.rollout_id for one in group])
        values = [said(one.spans) for one in group]
        return [Reward(value=float(sum(own > other for other in values))) for own in values][self._wrong :]


class Collecting:
    """Collects one step of four rollouts per task, which may be interrupted after it was collected."""

    seen: list[Collected]
    breaks: bool

    async def setup(self, context: AlgorithmContext) -> None:
        self._context = context

    async def step(self) -> StepReport:
        self.seen.append(await self._context.collect(self._context.train, step=1, n=4))
        if self.breaks:
            raise RuntimeError("broken")
        return StepReport(step=1, is_finished=True)

    def state(self) -> dict[str, Any]:
        return {}

    async def restore(self, state: dict[str, Any]) -> None: ...

    async def close(self) -> None: ...


class World:
    """An experiment that can be started again; the agent says a new number every time, and fails on request."""

    def __init__(self, folder: Path, reward: Any) -> None:
        self._folder, self._reward = folder, reward
        self.store = MemoryStore()
        self.seen: list[Collected] = []
        self.fails_from = 99
        self._count = 0

    def agent(self, task: Any) -> str:
        self._count += 1
        if self._count > self.fails_from:
            raise ValueError("failed")
        return str(self._count)

    def run(self, *, breaks: bool = False, **how: Any) -> None:
        made = type("Made", (Collecting,), {"seen": self.seen, "breaks": breaks})

        class Plugin:
            @hookimpl
            def agl_algorithms(self) -> list[AlgorithmEntry]:
                return [AlgorithmEntry(name="made", factory=made, tunes=("prompt_template",), needs_token_ids=False)]

        manager = PluginManager()
        manager.register(Plugin(), name="made")
        trainer = Trainer(
            name="groups",
            store=self.store,
            folder=self._folder,
            rewards=[self._reward],
            algorithm=algorithm("made"),
            initial_resources={"prompt": PromptTemplate(template="none")},
            plugins=manager,
            progress=Quiet(),
        )
        trainer.fit(self.agent, TASKS, **how)


def test_groups_are_compared_once_and_their_rewards_are_stored(tmp_path: Path) -> None:
    ranks = Ranks()
    world = World(tmp_path, ranks)
    world.run(val_dataset=TASKS)
    (collected,) = world.seen
    assert [4, 4] == [len(group) for group in ranks.groups]
    assert [{0.0, 1.0, 2.0, 3.0}] * 2 == [{one.reward for one in group} for group in collected.groups()]
    rewards = {one.rollout.rollout_id: one.reward for one in collected.episodes}
    assert rewards == asyncio.run(stored(world.store))


async def stored(store: MemoryStore) -> dict[str, float | None]:
    """Return the stored rewards of training rollouts; those of validation have none."""
    found: dict[str, float | None] = {}
    async for one in read_recordings(store, RolloutQuery(limit=100), spans="deciding"):
        rewards = [span.reward for span in one.spans if span.reward is not None]
        assert len(rewards) == (one.rollout.mode == "train")
        if rewards:
            assert "evaluator" == rewards[0].source
            found[one.rollout.rollout_id] = rewards[0].value
    return found


def test_step_that_is_repeated_after_a_crash_finds_the_rewards(tmp_path: Path) -> None:
    ranks = Ranks()
    world = World(tmp_path, ranks)
    with pytest.raises(RuntimeError, match="broken"):
        world.run(breaks=True)
    world.run(resume=True)
    first, second = ([(one.rollout.rollout_id, one.reward) for one in each.episodes] for each in world.seen)
    assert first == second
    assert 2 == len(ranks.groups)
    assert 8 == len(asyncio.run(stored(world.store)))


def test_failed_rollouts_are_not_compared_and_a_single_success_has_no_reward(tmp_path: Path) -> None:
    ranks = Ranks()
    world = World(tmp_path, ranks)
    world.fails_from = 5
    world.run()
    (collected,) = world.seen
    assert 4 == len(ranks.groups[0])
    assert 1 == len(ranks.groups)
    assert (4, {"failed": 3, "no reward": 1}) == (len(collected.episodes), collected.dropped)


def test_reward_that_returns_too_few_ends_the_run_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="the reward 'Ranks' returned 3 rewards for 4 rollouts"):
        World(tmp_path, Ranks(wrong=1)).run()
