"""``agl data copy`` moves a store from SQLite to PostgreSQL and back."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from agl import Reward, Rollout, Span
from agl.contracts import ExperimentRecord, LabelMove, Metric, RolloutQuery, Store, Trained
from agl.schemas import ErrorInfo, Outcome, PromptTemplate, ResourceVersion, RetryPolicy
from agl.stores import read_recordings
from agl_store_postgres.store import PostgresStore
from agl_store_sqlite._store import SQLiteStore

IDS = ["calc-0", "calc-1", "calc-2"]


async def fill(store: Store) -> None:
    """Record a rollout with two attempts and a late reward, a queued rollout, and an experiment with its data."""
    await store.publish([ResourceVersion(name="prompt", version="v1", resource=PromptTemplate(template="x"))])
    retry = RetryPolicy(max_attempts=2)
    await store.enqueue([Rollout(rollout_id=each, task=1, experiment="calc", retry=retry) for each in IDS])
    for status, error in (("failed", ErrorInfo(type="E", message="no")), ("succeeded", None)):
        (claim,) = await store.claim(worker="w", limit=1)
        await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status=status, error=error)])
    late = Span(rollout_id=IDS[0], attempt_id="calc-0.2", span_id="a" * 16, name="r", reward=Reward(value=1.0))
    await store.append_spans([late])
    await store.cancel([IDS[1]])
    await store.move_label(LabelMove(name="prompt", label="production", version="v1"))
    await store.log_metrics([Metric(experiment="calc", algorithm="a", step=1, name="loss", value=0.5, time=1.0)])
    record = ExperimentRecord(name="calc", live={"prompt": "v1"})
    ledger = Trained(experiment="calc", run=1, algorithm="a", step=1, rollout_ids=("calc-0",))
    await store.save_state({"experiment/calc/1/algorithm/a": b"{}"}, experiment=record, trained=[ledger])


async def contents(store: Store) -> Any:
    found = {
        "recordings": [each async for each in read_recordings(store, RolloutQuery(), spans="all")],
        "resources": await store.resources("prompt"),
        "moves": await store.label_moves("prompt", "production"),
        "metrics": await store.metrics("calc"),
        "experiments": await store.experiments(),
        "trained": await store.trained("calc", run=1, algorithm="a"),
        "states": {key: value.decode() for key, value in (await store.load_state("")).items()},
    }
    return msgspec.to_builtins(found)


async def use(store: Store, work: Any) -> Any:
    try:
        return await work(store)
    finally:
        await store.close()


def copy(*words: str) -> str:
    line = [sys.executable, "-m", "agl", "data", "copy", *words]
    return subprocess.run(line, capture_output=True, text=True, check=True, env=dict(os.environ)).stdout


def test_store_moves_from_sqlite_to_postgres_and_back(url: str, tmp_path: Path) -> None:
    first, last = tmp_path / "first.db", tmp_path / "last.db"
    asyncio.run(use(SQLiteStore(f"sqlite:///{first}"), fill))
    assert "copied 1 experiment, 3 rollouts\n" == copy(str(first), url)
    assert "copied 1 experiment, 0 rollouts; 3 were there already\n" == copy(str(first), url)
    assert "copied 1 experiment, 3 rollouts\n" == copy(url, str(last))

    stores = (SQLiteStore(f"sqlite:///{first}"), PostgresStore(url), SQLiteStore(f"sqlite:///{last}"))
    expected, on_postgres, back = (asyncio.run(use(store, contents)) for store in stores)
    assert expected == on_postgres
    assert expected == back
    assert ["calc-2.1"] == [
        claim.attempt.attempt_id
        for claim in asyncio.run(use(PostgresStore(url), lambda store: store.claim(worker="w", limit=9)))
    ]
