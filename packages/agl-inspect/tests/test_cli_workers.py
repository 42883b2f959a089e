"""``agl runs workers``: the processes of experiments, busy, idle or gone."""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from agl.contracts import ExperimentRecord, Presence, Store
from agl.schemas import Rollout
from agl_inspect.presence import worker_name
from agl_inspect.terminal.program import cli
from agl_store_sqlite._store import SQLiteStore


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that runs work on ``runs/agl.db`` in an empty folder; its clock is ``late_s`` seconds late."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGL_STORE", raising=False)

    def run(work: Callable[[Store], Awaitable[object]], *, late_s: float = 0.0) -> None:
        async def main() -> None:
            store = SQLiteStore("sqlite:///runs/agl.db", clock=lambda: time.time() - late_s)
            try:
                await work(store)
            finally:
                await store.close()

        asyncio.run(main())

    return run


def announcing(name: str, member: str, *, session: str = "s") -> Callable[[Store], Awaitable[None]]:
    async def work(store: Store) -> None:
        await store.save_state({}, experiment=ExperimentRecord(name=name))
        await store.announce(Presence(experiment=name, member=member, session=session, since=12.0))

    return work


def listed(*options: str) -> dict[str, dict[str, object]]:
    output = CliRunner().invoke(cli, ("runs", "workers", "--json", *options), catch_exceptions=False).output
    return {item["worker"]: item for item in json.loads(output)}


def test_workers_are_busy_idle_or_gone(use: Callable[..., None]) -> None:
    trainer, busy, gone = "boss@x:7:a", "node1@y:8:b", "node2@z:9:c"
    use(announcing("sql", gone), late_s=60)
    use(announcing("other", "node3@z:10:d"))
    use(announcing("sql", "", session=trainer))
    use(announcing("sql", busy, session=trainer))

    async def claim(store: Store) -> None:
        await store.enqueue([Rollout(rollout_id=f"ro-{at}", task=at, experiment="sql") for at in range(3)])
        await store.claim(worker="node1@y:8:other-name-of-the-process", limit=2)

    use(claim)
    found = listed("--experiment", "sql")
    states = {name: (item["role"], item["state"], item["attempts"]) for name, item in found.items()}
    expected = {trainer: ("trainer", "idle", 0), busy: ("worker", "busy", 2), gone: ("worker", "gone", 0)}
    assert expected == states
    assert ("node1", 8, "sql", 12.0) == tuple(found[busy][key] for key in ("host", "pid", "experiment", "since"))
    assert 4 == len(listed())


def test_worker_whose_process_ended_on_this_machine_is_gone(use: Callable[..., None]) -> None:
    ended = worker_name().replace(f":{os.getpid()}:", f":{2**22 + 1}:")
    use(announcing("sql", ended))
    assert "gone" == listed()[ended]["state"]


def test_store_without_workers_says_so(use: Callable[..., None]) -> None:
    async def nothing(store: Store) -> None:
        await store.save_state({}, experiment=ExperimentRecord(name="sql"))

    use(nothing)
    output = CliRunner().invoke(cli, ("runs", "workers"), catch_exceptions=False).output
    assert "no process takes part in an experiment of this store\n" == output
