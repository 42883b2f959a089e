"""A worker that is stopped at any moment of a claim gives back the rollouts that the store handed out."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agl.contracts import RolloutQuery, Store
from agl.schemas import Claim, Outcome, Rollout
from agl.stores import MemoryStore
from agl_run import RunContext, Worker
from agl_store_sqlite._store import SQLiteStore


class Idle:
    """A runner whose attempts never end on their own."""

    async def start(self) -> None:
        """Do nothing."""

    async def execute(self, claim: Claim) -> Outcome:
        """Wait forever."""
        return await asyncio.Future()

    async def stop(self) -> None:
        """Do nothing."""


class Held:
    """A store that has opened the attempts of the first claim, but delays its answer."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.is_held = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def claim(self, **how: Any) -> list[Claim]:
        claims = await self._store.claim(**how)
        if claims and not self.is_held.is_set():
            self.is_held.set()
            await asyncio.Future()
        return claims


class Silent(Held):
    """A store that never answers a claim."""

    async def claim(self, **how: Any) -> list[Claim]:
        self.is_held.set()
        return await asyncio.Future()


@pytest.fixture(params=["memory://", "sqlite:///"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory://" else SQLiteStore(f"sqlite:///{tmp_path / 'runs.db'}")


def test_worker_stopped_while_its_claim_is_answered_holds_nothing(store: Store) -> None:
    async def body() -> None:
        held = Held(store)
        await store.enqueue([Rollout(rollout_id=f"r{number}", task=None) for number in range(3)])
        async with asyncio.timeout(60), Worker(RunContext(store=held, concurrency=3), Idle()):
            await held.is_held.wait()
        rollouts = await store.rollouts(RolloutQuery())
        ended = [(each.status, each.error) for r in rollouts for each in await store.attempts(r.rollout_id)]
        assert [("queued", 0)] * 3 == [(each.status, each.losses) for each in rollouts]
        assert [("lost", None)] * 3 == ended
        await store.close()

    asyncio.run(body())


def test_worker_stops_though_its_store_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_run.worker.worker.GIVE_BACK_S", 0.05)

    async def body() -> None:
        silent = Silent(MemoryStore())
        async with asyncio.timeout(60), Worker(RunContext(store=silent), Idle()):
            await silent.is_held.wait()

    asyncio.run(body())
