"""The algorithm contract, for gepa."""

from collections.abc import Iterator

import pytest

from agl.schemas import Attempt, Episode, Reward
from agl_testing.conformance import AlgorithmConformance
from agl_testing.conformance.bench import AlgorithmScenario, RolloutOrder
from worlds.prompts import PromptWorld, complete_order, easy, judge, order_text
from worlds.prompts_optimizer import ScriptedOptimizer
from worlds.prompts_run import model_server

pytest.importorskip("gepa", reason="needs gepa")

from agl_algo_apo.gepa import GEPA
from agl_algo_apo.proposals.optimizer import OptimizerSettings


def play(world: PromptWorld, order: RolloutOrder) -> Episode:
    """Run the world's agent once; returns its episode."""
    rollout, task = order.rollout, order.rollout.task
    text = order.resources["clerk_prompt"].format(order=order_text(task["order"], task["fields"]["clerk"]))
    answer = complete_order(text, world=world, seed=rollout.rollout_id)
    score, said = judge(world, task, answer, is_short=False, seed=rollout.rollout_id)
    attempt = Attempt(attempt_id="a", rollout_id=rollout.rollout_id, number=1, worker="w", status="succeeded")
    return Episode(rollout=rollout, attempt=attempt, reward=score, rewards=(Reward(value=score, feedback=said),))


class TestGEPA(AlgorithmConformance):
    @pytest.fixture
    def scenario(self) -> Iterator[AlgorithmScenario]:
        world = easy(1)
        with model_server(world, ScriptedOptimizer()) as server:
            optimizer = OptimizerSettings(base_url=server.base_url, model="editor")
            yield AlgorithmScenario(
                make=lambda: GEPA(optimizer=optimizer, budget=300, phases=2),
                play=lambda order: play(world, order),
                tunes=("clerk_prompt",),
                resources=world.seeds(),
                train=world.train,
                val=world.val,
            )
