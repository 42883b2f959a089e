"""Searches together with other algorithms and models in one experiment."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

import agl
from agl.algorithms import algorithm
from agl.contracts import RolloutQuery
from agl.errors import ConfigError
from agl.schemas import Rollout
from agl.stores import MemoryStore
from agl_inspect.records.state import load_algorithm
from agl_run import Quiet, ScheduleConfig, policy
from worlds.prompts import duo, easy
from worlds.prompts_optimizer import ScriptedOptimizer
from worlds.prompts_run import HIDDEN, TASK_MODEL, model_server, order_agent, order_reward


class Both:
    """A finished experiment with two searches, each on its own prompt."""

    def __init__(self, folder: Path, schedule: ScheduleConfig) -> None:
        self.world, store = duo(1), MemoryStore("memory://")
        self.labels = {name: name.removesuffix("_prompt") for name in self.world.seeds()}
        with model_server(self.world, ScriptedOptimizer()) as server:
            served = {"base_url": server.base_url, "model": "editor"}
            trainer = agl.Trainer(
                name="orders",
                store=store,
                algorithm=[agl.APO(tunes=n, name=name, optimizer=served, budget=400) for n, name in self.items()],
                schedule=schedule,
                initial_resources=dict(self.world.seeds()),
                rewards=(order_reward(self.world),),
                hidden=HIDDEN,
                folder=folder,
                progress=Quiet(),
                validation_limit=2,
            )
            trainer.fit(order_agent(self.world), self.world.train, self.world.val)
        self.rollouts, self.states = asyncio.run(self._read(store))
        self.best = {n: (folder / f"runs/orders/run-1/{label}/best/{n}.txt").read_text() for n, label in self.items()}

    def items(self) -> list[tuple[str, str]]:
        """Return the prompt and the label of each search."""
        return list(self.labels.items())

    def paid(self, label: str) -> list[Rollout]:
        """Return the rollouts that the search with this label requested."""
        return [rollout for rollout in self.rollouts if rollout.metadata["algorithm"] == label]

    def others(self, rollout: Rollout, label: str) -> tuple[tuple[str, str], ...]:
        """Return the versions of the other search's prompt that a rollout ran with."""
        return tuple(sorted((n, v) for n, v in rollout.resources.items() if self.labels.get(n) != label))

    async def _read(self, store: MemoryStore) -> tuple[list[Rollout], dict[str, Any]]:
        rollouts = await store.rollouts(RolloutQuery(experiment="orders", limit=100_000))
        return rollouts, {label: await load_algorithm(store, "orders", 1, label) for _, label in self.items()}


@pytest.mark.parametrize("mode", ["alternate", "concurrent"])
def test_two_searches_measure_again_what_the_other_changed(tmp_path: Path, mode: Any) -> None:
    both = Both(tmp_path, ScheduleConfig(mode=mode, every=3 if mode == "alternate" else 1))
    assert both.world.gap_closed(both.best) > (0.4 if mode == "alternate" else 0.0)
    seen: dict[str, set[Any]] = {}
    for _, label in both.items():
        paid = both.paid(label)
        assert len(paid) <= 400
        whole = Counter(both.others(rollout, label) for rollout in paid if "-whole-" in rollout.rollout_id)
        # The trainer's validation before the first step is a part of the first measurement.
        before = [r for r in both.rollouts if (r.metadata["algorithm"], r.metadata["step"]) == ("validate", 0)]
        whole.update(key for key in (both.others(r, label) for r in before) if key in whole)
        assert set(whole.values()) <= {24, 25, 26}, "once for each change of the other; test tasks on top"
        known = {row[4]["rollout"] for row in both.states[label].state["scores"]}
        assert len({both.others(rollout, label) for rollout in paid if rollout.rollout_id in known}) <= 1
        steps: dict[Any, set[Any]] = {}
        for rollout in paid:
            steps.setdefault(rollout.metadata["step"], set()).add(both.others(rollout, label))
        assert {1} == {len(versions) for versions in steps.values()}, "what changes during a step counts after it"
        seen[label] = set(whole)
    assert max(len(versions) for versions in seen.values()) > 1


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
                agl.APO(tunes="other_prompt", name="payer", optimizer=served, budget=150),
                agl.APO(tunes="clerk_prompt", name="student", optimizer=served, budget=150, source="payer"),
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
    """Records the messages that a user would see."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def one_after_the_other(folder: Path, *, second_budget: int) -> tuple[Any, list[str]]:
    """Run random search and then apo on one prompt; returns the store and the messages, with an error last."""
    world, store, progress = easy(1), MemoryStore("memory://"), Listening()
    with model_server(world, ScriptedOptimizer()) as server:
        served = {"base_url": server.base_url, "model": "editor"}
        trainer = agl.Trainer(
            name="orders",
            store=store,
            algorithm=[
                algorithm("random", tunes="clerk_prompt", optimizer=served, budget=120),
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


@pytest.mark.long
def test_policy_that_the_experiment_serves_can_be_the_optimizer(tmp_path: Path) -> None:
    world, store = msgspec.structs.replace(easy(1), val_size=16), MemoryStore("memory://")
    script = ScriptedOptimizer()
    with model_server(world, script) as server:
        trainer = agl.Trainer(
            name="orders",
            store=store,
            algorithm=agl.APO(
                tunes="clerk_prompt", optimizer="writer", critic="writer", budget=80, scoring={"error": 1}
            ),
            policies={
                name: policy("openai", base_url=server.base_url, model=model, api_key_env="")
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
    assert script.calls > 3
    best = (tmp_path / "runs/orders/run-1/apo/best/clerk_prompt.txt").read_text()
    assert world.gap_closed({"clerk_prompt": best}) > 0.3
