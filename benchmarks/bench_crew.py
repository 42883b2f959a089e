"""A crew of five: how far the team falls after the update of one of its agents, in turns and together.

Every run is a whole experiment of five agents that should agree; each agent's policy is a table, so that the team's
expected reward before and after each update is exact. In turns, each agent learns from rollouts of its own; together,
all learn from those that the first collected before the updates of the round. It needs agl-objectives and torch.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import agl
from agl import PluginManager
from agl.algorithms import algorithm
from agl_run import Quiet
from agl_store_sqlite import SQLiteStore
from benchmarks._harness import Figure

ROUNDS, SEEDS = 4, 5

FIRST = "in turns"
ARMS: dict[str, dict[str, Any]] = {
    FIRST: {"is_in_turns": True},
    "together": {},
    "together, an eighth of the step": {"lr": 8.0},
    "in turns, a quarter of the rollouts": {"is_in_turns": True, "rollouts": 16},
    "in turns, grpo": {"is_in_turns": True, "estimator": "grpo", "lr": 16.0},
}


def run(*, quick: bool) -> list[Figure]:
    """All rows of the table; none where torch is not installed."""
    if not find_spec("agl_objectives") or not find_spec("torch"):
        return []
    seeds = range(1 if quick else SEEDS)
    return [figure(name, [train(seed, **arm) for seed in seeds]) for name, arm in ARMS.items()]


def figure(name: str, arm: Sequence[Sequence[float]]) -> Figure:
    """Return the largest fall over all seeds, with the fall and the reward in the end of each."""
    each = "; ".join(f"{fall(rewards):.3f}, end {rewards[-1]:.2f}" for rewards in arm)
    return Figure(
        name=f"largest fall after an agent's update, {name} ({each})",
        value=max(map(fall, arm)),
        unit="of 1",
        bar=0.02 if name == FIRST else None,
        better="lower",
    )


def fall(rewards: Sequence[float]) -> float:
    """Return the most that the expected reward fell from one update to the next; 0 if it never fell."""
    return max(0.0, *(before - after for before, after in pairwise(rewards)))


def train(
    seed: int, *, rounds: int = ROUNDS, rollouts: int = 64, is_in_turns: bool = False, **params: Any
) -> list[float]:
    """Run one experiment; returns the team's expected reward before the first update and after each."""
    from worlds.crew import AGENTS, CrewPlugin, answer, first_tables

    plugins = PluginManager.from_environment()
    plugins.register(CrewPlugin(), name="crew")
    first, *others = AGENTS
    params = {"steps": rounds, "lr": 64.0, "entropy": 0.0, **params}
    collecting = {"group_size": rollouts}
    rest = collecting if is_in_turns else {"source": "one"}
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/runs.db"
        agl.Trainer(
            algorithm=[
                algorithm("crew", name="one", tunes=first, **collecting, **params),
                *(algorithm("crew", name=f"of-{name}", tunes=name, **rest, **params) for name in others),
            ],
            initial_resources=first_tables(),
            schedule={"mode": "alternate"},
            plugins=plugins,
            store=url,
            folder=folder,
            seed=seed,
            progress=Quiet(),
        ).fit(answer, train_dataset=["Do we agree?"])
        return asyncio.run(expected(url))


async def expected(url: str) -> list[float]:
    """Return the expected reward of the first versions, and after each update in their order."""
    from worlds.crew import AGENTS, expected_reward, first_tables

    store = SQLiteStore(url)
    found = [version for agent in AGENTS for version in await store.resources(agent) if version.algorithm]
    await store.close()
    tables = {agent: resource.value for agent, resource in first_tables().items()}
    rewards = [expected_reward(list(tables.values()))]
    for version in sorted(found, key=lambda version: version.created_at):
        tables[version.name] = version.resource.value
        rewards.append(expected_reward(list(tables.values())))
    return rewards
