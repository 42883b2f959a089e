"""A world in which apo can learn, as a real experiment in a folder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

import agl
from agl.algorithms import algorithm
from agl.contracts import RolloutQuery
from agl.schemas import Rollout
from agl.stores import MemoryStore
from agl_inspect.records.state import load_algorithm
from agl_run import Quiet
from worlds.prompts import PromptWorld, easy
from worlds.prompts_optimizer import ScriptedOptimizer
from worlds.prompts_run import HIDDEN, model_server, order_agent, order_reward


@dataclass
class Run:
    """A finished experiment: its result, its files and its stored data."""

    fit: Any
    folder: Path
    rollouts: list[Rollout]
    state: dict[str, Any]
    stop_reason: str
    said: list[str]
    use: str
    progress: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.progress = self.state["progress"]

    @property
    def paid(self) -> list[Rollout]:
        """The rollouts that the budget paid for: the algorithm's own and those of the trainer's validation."""
        return [rollout for rollout in self.rollouts if rollout.metadata.get("algorithm") in (self.use, "validate")]

    @property
    def workdir(self) -> Path:
        return self.folder / "runs/orders/run-1" / self.use

    @property
    def result(self) -> dict[str, Any]:
        return msgspec.json.decode((self.workdir / "result.json").read_bytes())

    @property
    def best(self) -> dict[str, str]:
        return {path.stem: path.read_text() for path in (self.workdir / "best").glob("*.txt")}

    @property
    def lineage(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(line) for line in (self.workdir / "lineage.jsonl").read_bytes().splitlines()]


class Listening(Quiet):
    """Records the messages that a user would see."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@contextmanager
def serving(world: PromptWorld, optimizer: ScriptedOptimizer | None = None) -> Iterator[dict[str, Any]]:
    """Run the scripted model while the block runs; yields the optimiser's settings for it."""
    with model_server(world, optimizer or ScriptedOptimizer()) as server:
        yield {"base_url": server.base_url, "model": "editor", "retry_s": 0.01, "wait_s": 0.2}


@pytest.fixture
def optimize(tmp_path: Path) -> Callable[..., Run]:
    """Return a function that runs an algorithm in the world to its end; keyword arguments are the algorithm's."""

    def run(
        world: PromptWorld | None = None,
        *,
        use: str = "apo",
        script: ScriptedOptimizer | None = None,
        runners: int = 8,
        seed: int = 0,
        fault: Any = None,
        resources: Any = None,
        tunes: tuple[str, ...] | None = None,
        train: Any = None,
        val: Any = None,
        folder: str = "run",
        settings: Any = None,
        resume: bool = False,
        wait_s: float = 0.2,
        validation_limit: int = 2,
        store: Any = None,
        two_models: bool = False,
        **params: Any,
    ) -> Run:
        world = world or easy(1)
        store, progress = store or MemoryStore("memory://"), Listening()
        initial = resources or dict(world.seeds())
        with serving(world, script) as served:
            served["wait_s"] = wait_s
            if two_models:
                params["critic"] = {**served, "model": "critic"}
            chosen = algorithm(use, tunes=tunes or tuple(initial), **{"optimizer": served, **params})
            trainer = agl.Trainer(
                algorithm=chosen,
                name="orders",
                store=store,
                n_runners=runners,
                seed=seed,
                initial_resources=initial,
                hidden=HIDDEN,
                folder=tmp_path / folder,
                progress=progress,
                validation_limit=validation_limit,
                **{"rewards": (order_reward(world),), **(settings or {})},
            )
            fit = trainer.fit(order_agent(world, fault=fault), train or world.train, val or world.val, resume=resume)
        return read_run(fit, store, tmp_path / folder, progress.said, use)

    return run


def read_run(fit: Any, store: Any, folder: Path, said: list[str], use: str = "apo") -> Run:
    """Return the data of a finished experiment."""
    import asyncio

    async def read() -> Any:
        rollouts = await store.rollouts(RolloutQuery(experiment="orders", limit=100_000))
        return rollouts, await load_algorithm(store, "orders", 1, use)

    rollouts, state = asyncio.run(read())
    return Run(
        fit=fit,
        folder=folder,
        rollouts=rollouts,
        state=state.state,
        stop_reason=state.stop_reason,
        said=said,
        use=use,
    )
