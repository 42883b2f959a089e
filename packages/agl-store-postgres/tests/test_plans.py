"""PostgreSQL uses the intended index, whatever the table statistics are."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

import psycopg

from agl.contracts import RolloutQuery
from agl_store_postgres.store import PostgresStore
from agl_testing.stores.samples import make_rollout


def test_short_list_is_found_where_the_statistics_know_a_long_one_only(url: str) -> None:
    async def body() -> tuple[float, float]:
        store = PostgresStore(url)
        for _ in range(50):
            await store.enqueue([make_rollout(experiment="long") for _ in range(500)])
        with psycopg.connect(url.partition("?")[0], autocommit=True) as connection:
            connection.execute("ANALYZE")
        (mine,) = await store.enqueue([make_rollout(experiment="short")])
        query = RolloutQuery(experiment="short", status=("queued",))
        assert [mine] == await store.rollouts(query)
        times = [(await _time(store.cursor), await _time(lambda: store.rollouts(query))) for _ in range(21)]
        await store.close()
        return statistics.median(first for first, _ in times), statistics.median(second for _, second in times)

    cursor_s, list_s = asyncio.run(body())
    assert list_s < 8 * cursor_s


async def _time(work: Callable[[], Awaitable[object]]) -> float:
    begin = time.perf_counter()
    await work()
    return time.perf_counter() - begin
