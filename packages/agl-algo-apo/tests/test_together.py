"""Searches beside other algorithms and models of one experiment."""

import asyncio
import json
from pathlib import Path
from typing import Any

import agl
from agl.contracts import RolloutQuery
from agl.errors import ConfigError
from agl.experiment.config import ScheduleConfig
from agl.experiment.progress import Quiet
from agl.experiment.state import load_algorithm
from agl.stores.memory import MemoryStore
from agl_testing.prompt_world import duo, easy
from agl_testing.prompt_world_optimizer import ScriptedOptimizer
from agl_testing.prompt_world_run import HIDDEN, TASK_MODEL, model_server, order_agent, order_reward


def test_two_searches_take_turns_and_measure_again_what_the_other_changed(tmp_path: Path) -> None:
    world, store = duo(1), MemoryStore("memory://")
    labels = {name: name.removesuffix("_prompt") for name in world.seeds()}
    with model_server(world, ScriptedOptimizer()) as server:
        served = {"base_url": server.base_url, "model": "editor"}
        trainer = agl.Trainer(
            name="orders",
            store=store,
            algorithm=[
                agl.APO(tunes=name, label=label, optimizer=served, budget=300) for name, label in labels.items()
            ],
            schedule=ScheduleConfig(mode="alternate", every=3),
            initial_resources=dict(world.seeds()),
            rewards=(order_reward(world),),
            hidden=HIDDEN,
            folder=tmp_path,
            progress=Quiet(),
            validation_limit=2,
        )
        trainer.fit(order_agent(world), world.train, world.val)

    async def read() -> tuple[Any, Any]:
        rollouts = await store.rollouts(RolloutQuery(experiment="orders", limit=100_000))
        states = [await load_algorithm(store, "orders", 1, label) for label in labels.values()]
        return rollouts, states

    rollouts, states = asyncio.run(read())
    best = {
        name: (tmp_path / f"runs/orders/run-1/{label}/best/{name}.txt").read_text() for name, label in labels.items()
    }
    assert world.gap_closed(best) > 0.7
    for label, state in zip(labels.values(), states, strict=True):
        paid = [rollout for rollout in rollouts if rollout.metadata["algorithm"] == label]
        assert len(paid) <= 300
        again = [rollout for rollout in paid if "-whole-" in rollout.rollout_id]
        assert len(again) >= 2 * len(world.val), "the incumbent was measured again after the other one's turn"
        known = {row[4]["rollout"] for row in state.state["scores"]}
        environments = {
            tuple(sorted((n, v) for n, v in rollout.resources.items() if labels.get(n) != label))
            for rollout in paid
            if rollout.rollout_id in known
        }
        assert 1 == len(environments), "rewards from before and after the other one's changes are not mixed"


def test_failures_that_another_algorithm_paid_for_are_looked_at_first(tmp_path: Path) -> None:
    world, store = easy(1), MemoryStore("memory://")
    seeds = {**world.seeds(), "other_prompt": agl.PromptTemplate(template="Nobody reads this.")}
    script = ScriptedOptimizer()
    with model_server(world, script) as server:
        served = {"base_url": server.base_url, "model": "editor"}
        trainer = agl.Trainer(
            name="orders",
            store=store,
            algorithm=[
                agl.APO(tunes="other_prompt", label="payer", optimizer=served, budget=150, delete_every=0),
                agl.APO(tunes="clerk_prompt", label="student", optimizer=served, budget=150, source="payer"),
            ],
            initial_resources=seeds,
            rewards=(order_reward(world),),
            hidden=HIDDEN,
            folder=tmp_path,
            progress=Quiet(),
            validation_limit=2,
        )
        trainer.fit(order_agent(world), world.train, world.val)

    async def tasks(label: str, step: int) -> set[str]:
        rollouts = await store.rollouts(RolloutQuery(experiment="orders", mode="train", limit=100_000))
        mine = [r for r in rollouts if (r.metadata["algorithm"], "-batch-" in r.rollout_id) == (label, True)]
        return {str(r.task) for r in mine if step in (0, r.metadata["step"])}

    paid, first = asyncio.run(tasks("payer", 0)), asyncio.run(tasks("student", 2))
    assert len(first) == 8
    assert first <= paid


class Listening(Quiet):
    """Keeps what the person would be told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def one_after_the_other(folder: Path, *, second_budget: int) -> tuple[Any, list[str]]:
    """Random search and then apo on one prompt; the store, and what was said, an error last."""
    world, store, progress = easy(1), MemoryStore("memory://"), Listening()
    with model_server(world, ScriptedOptimizer()) as server:
        served = {"base_url": server.base_url, "model": "editor"}
        trainer = agl.Trainer(
            name="orders",
            store=store,
            algorithm=[
                agl.Algorithm("random", tunes="clerk_prompt", optimizer=served, budget=120),
                agl.APO(tunes="clerk_prompt", optimizer=served, budget=second_budget),
            ],
            initial_resources=dict(world.seeds()),
            rewards=(order_reward(world),),
            hidden=HIDDEN,
            folder=folder,
            progress=progress,
            validation_limit=2,
        )
        try:
            trainer.fit(order_agent(world), world.train, world.val)
        except ConfigError as error:
            progress.said.append(str(error))
    return store, progress.said


def test_second_search_says_its_plan_at_its_turn_and_starts_from_what_the_first_left(tmp_path: Path) -> None:
    _, said = one_after_the_other(tmp_path, second_budget=150)
    plan = next(number for number, line in enumerate(said) if line.startswith("apo: plan: at most 150"))
    assert any(line.startswith("random step") for line in said[:plan])
    workdir = tmp_path / "runs/orders/run-1"
    first = json.loads((workdir / "apo/lineage.jsonl").read_text().splitlines()[0])
    assert (workdir / "random/best/clerk_prompt.txt").read_text() == first["texts"]["clerk_prompt"]


def test_second_search_that_cannot_work_is_refused_before_the_first_pays(tmp_path: Path) -> None:
    store, said = one_after_the_other(tmp_path, second_budget=20)
    assert "apo has a budget of 20 rollouts and needs at least" in said[-1]
    assert [] == asyncio.run(store.rollouts(RolloutQuery(experiment="orders")))


def test_policy_that_the_experiment_serves_can_be_the_optimizer(tmp_path: Path) -> None:
    world, store = easy(1), MemoryStore("memory://")
    script = ScriptedOptimizer()
    with model_server(world, script) as server:
        trainer = agl.Trainer(
            name="orders",
            store=store,
            algorithm=agl.APO(tunes="clerk_prompt", optimizer="writer", critic="writer", budget=150),
            policies={
                name: agl.Policy("openai", base_url=server.base_url, model=model, api_key_env="")
                for name, model in (("clerk", TASK_MODEL), ("writer", "editor"))
            },
            initial_resources=dict(world.seeds()),
            rewards=(order_reward(world),),
            gateway="none",
            hidden=HIDDEN,
            folder=tmp_path,
            progress=Quiet(),
            validation_limit=2,
        )
        trainer.fit(order_agent(world), world.train, world.val)
    assert script.calls > 6
    best = (tmp_path / "runs/orders/run-1/apo/best/clerk_prompt.txt").read_text()
    assert world.gap_closed({"clerk_prompt": best}) > 0.3
