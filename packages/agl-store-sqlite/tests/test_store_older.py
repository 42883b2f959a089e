"""A file that an older release wrote, with data of every kind, opens and has everything in its new place.

``data/layout2.sql`` is what SQLite dumps of such a file. Labels, scores, experiments, ledgers and presence lay among
the states of algorithms there.
"""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from agl.contracts import ExperimentRecord, RolloutQuery, Store, VersionScore
from agl.schemas import unpack_ids
from agl_inspect.records.state import AlgorithmState, load_algorithm, trained_rollouts, unfinished_experiments
from agl_store_sqlite._store import SQLiteStore

T = TypeVar("T")
Read = Callable[[Callable[[Store], Awaitable[T]]], T]

NAME = "team/prompt"


@pytest.fixture
def read(tmp_path: Path) -> Read[object]:
    """Opens the older file, reads it, and closes it."""
    path = tmp_path / "older.db"
    connection = sqlite3.connect(path)
    connection.executescript((Path(__file__).parent / "data" / "layout2.sql").read_text(encoding="utf-8"))
    connection.close()

    def read(work: Callable[[Store], Awaitable[T]]) -> T:
        async def body() -> T:
            store = SQLiteStore(f"sqlite:///{path}", clock=lambda: 1_700_000_001.0)
            try:
                return await work(store)
            finally:
                await store.close()

        return asyncio.run(body())

    return read


def test_labels_keep_their_moves(read: Read[list[object]]) -> None:
    async def work(store: Store) -> list[object]:
        moves = await store.label_moves(NAME, "production")
        assert sorted(move.moved_at for move in moves) == [move.moved_at for move in moves]
        pointing = {move.label: move.version for move in await store.labels(NAME)}
        return [[(move.version, move.is_back, move.reason) for move in moves], pointing, len(await store.labels())]

    moves = [("v1", False, "first"), ("v2", False, "better"), ("v1", True, "back from v2")]
    assert [moves, {"candidate": "v2", "production": "v1"}, 2] == read(work)


def test_scores_and_versions_are_kept(read: Read[list[object]]) -> None:
    async def work(store: Store) -> list[object]:
        return [await store.scores(NAME), [version.version for version in await store.resources(NAME)]]

    score = VersionScore(name=NAME, version="v2", mean=0.5, low=0.25, high=0.75, n=8, how="fresh rollouts")
    assert [[score], ["v1", "v2"]] == read(work)


def test_experiments_their_ledgers_and_states_are_kept(read: Read[list[object]]) -> None:
    async def work(store: Store) -> list[object]:
        return [
            await store.experiments(),
            await unfinished_experiments(store),
            await store.trained("e/1", run=2, algorithm="grpo"),
            await trained_rollouts(store, "e/1", 2, "grpo"),
            await load_algorithm(store, "e/1", 2, "grpo"),
            list(await store.load_state("")),
        ]

    running = ExperimentRecord(name="e/1", run=2, live={NAME: "v2"}, turn=3, owner="w")
    ledger = {"a": 1, "b": 1, "c/d": 2}
    assert [
        [ExperimentRecord(name="done", status="finished"), running],
        {"e/1"},
        ledger,
        set(ledger),
        AlgorithmState(step=2, state={"seed": 1}),
        ["experiment/e/1/2/algorithm/grpo"],
    ] == read(work)


def test_presence_of_a_stopped_experiment_is_forgotten(read: Read[list[object]]) -> None:
    async def work(store: Store) -> list[object]:
        return [*await store.presences("e/1")]

    assert [] == read(work)


def test_rollouts_spans_changes_and_metrics_are_kept(read: Read[list[object]]) -> None:
    async def work(store: Store) -> list[object]:
        recordings = {each.rollout.rollout_id: each for each in await store.recordings(RolloutQuery())}
        done = recordings["ro-0"]
        return [
            [each.rollout.status for each in recordings.values()],
            [(attempt.attempt_id, attempt.status) for attempt in done.attempts],
            (done.rollout.attempts, done.rollout.failures, done.rollout.losses, done.rollout.attempt_id),
            [len(unpack_ids(span.call.prompt_ids)) for span in done.spans if span.call],
            [span.reward.value for span in done.spans if span.reward],
            len(await store.changes()) > 8,
            [(metric.run, metric.step, metric.value) for metric in await store.metrics("e/1")],
        ]

    statuses = ["succeeded", "running", "queued", "queued"]
    attempts = [("ro-0.1", "failed"), ("ro-0.2", "succeeded")]
    assert [statuses, attempts, (2, 1, 0, "ro-0.2"), [40, 70, 100], [1.0], True, [(2, 1, 0.5)]] == read(work)
