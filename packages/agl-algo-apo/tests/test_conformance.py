"""The algorithm contract, for every search of this distribution."""

from collections.abc import Iterator
from typing import Any

import pytest

from agl.schemas import Attempt, Episode, Reward
from agl_algo_apo.apo import APO
from agl_algo_apo.proposals.optimizer import OptimizerSettings
from agl_algo_apo.random_search import RandomSearch
from agl_testing.conformance import AlgorithmConformance
from agl_testing.conformance.bench import AlgorithmScenario, RolloutOrder
from worlds.prompts import PromptWorld, complete_order, easy, judge, order_text
from worlds.prompts_optimizer import ScriptedOptimizer
from worlds.prompts_run import model_server

pytestmark = pytest.mark.alone


def play(world: PromptWorld, order: RolloutOrder) -> Episode:
    """Run the world's agent once; returns its episode."""
    rollout, task = order.rollout, order.rollout.task
    seed = rollout.rollout_id
    text = order.resources["clerk_prompt"].format(order=order_text(task["order"], task["fields"]["clerk"]))
    answer = complete_order(text, world=world, seed=f"{seed}|clerk")
    score, said = judge(world, task, answer, is_short=False, seed=seed)
    return Episode(
        rollout=rollout,
        attempt=Attempt(attempt_id=f"{seed}.1", rollout_id=seed, number=1, worker="w", status="succeeded"),
        reward=score,
        rewards=(Reward(value=score, feedback=said),),
    )


class Searches(AlgorithmConformance):
    """The scenario in which all searches are tested."""

    algorithm: Any

    @pytest.fixture
    def scenario(self) -> Iterator[AlgorithmScenario]:  # pyright: ignore[reportIncompatibleMethodOverride]  # a fixture
        world = easy(1)
        with model_server(world, ScriptedOptimizer()) as server:
            optimizer = OptimizerSettings(base_url=server.base_url, model="editor")
            yield AlgorithmScenario(
                make=lambda: type(self).algorithm(optimizer=optimizer, budget=200),
                play=lambda order: play(world, order),
                tunes=("clerk_prompt",),
                resources=world.seeds(),
                train=world.train,
                val=world.val,
                max_steps=40,
            )


class TestAPO(Searches):
    algorithm = APO


class TestRandomSearch(Searches):
    algorithm = RandomSearch


del Searches
