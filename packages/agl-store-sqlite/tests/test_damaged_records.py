"""A record that cannot be read is named once; it hides no other record, and stops no worker."""

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest

from agl import semconv
from agl.contracts import RolloutQuery
from agl.errors import NotFoundError
from agl.schemas import Outcome, Rollout, encode
from agl.stores import all_spans, is_readable, read_recordings
from agl_store_sqlite._store import SQLiteStore
from agl_store_sqlite.sql.rows import readable_page
from agl_testing.stores.samples import make_span

GARBAGE = ("x'c1ff'", "CAST('garbage' AS BLOB)", "zeroblob(9)")


class File:
    """A store file: the finished rollouts ``a-0`` to ``a-3``, each with five spans, and the queued ``q-0``, ``q-1``."""

    def __init__(self, path: Path) -> None:
        self.path, self.now = path, 1_000.0
        self.use(self._fill)

    async def _fill(self, store: SQLiteStore) -> None:
        await store.enqueue([Rollout(rollout_id=f"a-{number}", task=number, experiment="e") for number in range(4)])
        for claim in await store.claim(worker="w", limit=4):
            spans = tuple(make_span(claim) for _ in range(5))
            await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="succeeded", spans=spans)])
        await store.enqueue([Rollout(rollout_id=f"q-{number}", task=number, experiment="e") for number in range(2)])

    def use(self, work: Callable[[SQLiteStore], Awaitable[None]]) -> None:
        async def body() -> None:
            store = SQLiteStore(f"sqlite:///{self.path}", clock=lambda: self.now)
            try:
                await asyncio.wait_for(work(store), 30)
            finally:
                await store.close()

        asyncio.run(body())

    def change(self, sql: str) -> None:
        with closing(sqlite3.connect(self.path)) as database:
            assert database.execute(sql).rowcount > 0
            database.commit()


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "runs.db")


CHANGES = (*(f"data = {each}" for each in GARBAGE), "status = 'odd'", "finished_at = 'yesterday'")


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_damaged_rollout_is_named_once_and_hides_no_other(
    file: File, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    own = f"a-1-{number}"
    file.change(f"UPDATE rollouts SET rollout_id = '{own}', {CHANGES[number]} WHERE rollout_id = 'a-1'")

    async def body(store: SQLiteStore) -> None:
        left = ["a-0", "a-2", "a-3"]
        for query in (
            RolloutQuery(status=("succeeded",)),
            RolloutQuery(experiment="e", status=("succeeded",), limit=1),
        ):
            found = [each.rollout.rollout_id async for each in read_recordings(store, query, spans="all")]
            assert left == found
        assert "q-1" == (await store.rollouts(RolloutQuery(limit=1, is_newest_first=True)))[0].rollout_id
        with pytest.raises(NotFoundError, match=f"the record of rollout '{own}' cannot be read"):
            await store.rollouts(RolloutQuery(ids=(own,)))

    with caplog.at_level(logging.WARNING):
        file.use(body)
    assert 1 == sum(
        f"rollout '{own}' cannot be read (damaged, or of another version of agl)" in each for each in caplog.messages
    )


def test_rollout_whose_id_is_a_path_is_damaged(file: File) -> None:
    data = Rollout(rollout_id="../a", task=1, experiment="e")

    async def body(store: SQLiteStore) -> None:
        assert 5 == len(await store.rollouts(RolloutQuery()))

    with closing(sqlite3.connect(file.path)) as database:
        database.execute("UPDATE rollouts SET data = ? WHERE rollout_id = 'a-0'", (encode(data),))
        database.commit()
    file.use(body)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("place", [1, 2, 5])
def test_unreadable_span_stands_for_a_damaged_one(file: File, garbage: str, place: int) -> None:
    file.change(f"UPDATE spans SET data = {garbage} WHERE key & 0xffffff = {place} AND key >> 38 = 2")

    async def body(store: SQLiteStore) -> None:
        spans = await all_spans(store, "a-1")
        assert [1, 2, 3, 4, 5] == [span.sequence for span in spans]
        odd = spans.pop(place - 1)
        assert (semconv.UNREADABLE, "error", "a-1", "a-1.1") == (odd.name, odd.status, odd.rollout_id, odd.attempt_id)
        assert not [span for span in spans if span.name == semconv.UNREADABLE]
        assert semconv.UNREADABLE not in {span.name for span in await all_spans(store, "a-2")}

    file.use(body)


def test_attempt_with_an_error_stands_for_a_damaged_one(file: File, caplog: pytest.LogCaptureFixture) -> None:
    file.change("UPDATE attempts SET data = x'c1' WHERE id >> 14 = 3")

    async def body(store: SQLiteStore) -> None:
        (odd,), (whole,) = await store.attempts("a-2"), await store.attempts("a-3")
        assert ("a-2.1", 1, "succeeded") == (odd.attempt_id, odd.number, odd.status)
        assert odd.error is not None
        assert (semconv.UNREADABLE, None) == (odd.error.type, whole.error)
        assert [True, True, False, True] == [
            is_readable(each) async for each in read_recordings(store, RolloutQuery(status=("succeeded",)))
        ]

    file.use(body)
    assert ["attempt 'a-2.1' cannot be read"] == [each[:30] for each in caplog.messages]


def test_claim_from_any_experiment_takes_the_oldest(file: File) -> None:
    async def body(store: SQLiteStore) -> None:
        await store.enqueue([Rollout(rollout_id=f"b-{n}", task=n, experiment="abc"[n % 3]) for n in range(6)])
        found = [claim.rollout.rollout_id for claim in await store.claim(worker="w", limit=5)]
        assert ["q-0", "q-1", "b-0", "b-1", "b-2"] == found

    file.use(body)


def test_page_behind_many_damaged_rows_is_read_in_few_steps() -> None:
    fetched: list[int] = []

    def fetch(limit: int) -> list[int]:
        fetched.append(limit)
        return list(range(3_000))[:limit]

    def read(row: int) -> Rollout:
        if row < 2_000:
            raise NotFoundError("rollout", str(row))
        return Rollout(rollout_id=str(row), task=row)

    assert ["2000"] == [each.rollout_id for each in readable_page(fetch, read, 1)]
    assert 12 == len(fetched)
