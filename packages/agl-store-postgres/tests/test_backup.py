"""A dump made while the store is open becomes a store that continues from the state at that time."""

import asyncio
import subprocess
from pathlib import Path

from agl.contracts import RolloutQuery
from agl_store_postgres.sharded_store import ShardedPostgresStore
from agl_store_postgres.store import PostgresStore
from agl_testing.stores.samples import finish_one, make_rollout, make_span, start_one


async def test_dump_comes_back_and_goes_on(server, binaries: Path, tmp_path: Path) -> None:
    with server.connect() as connection:
        connection.execute("CREATE DATABASE original")
        connection.execute("CREATE DATABASE copy")
    dump = tmp_path / "runs.dump"

    store = PostgresStore(server.url_for("original"))
    for _ in range(3):
        await finish_one(store, spans=2)
    await start_one(store)
    run(binaries / "pg_dump", "--schema=agl", "--format=custom", f"--file={dump}", server.url_for("original"))
    run(binaries / "pg_restore", f"--dbname={server.url_for('copy')}", str(dump))
    restored = PostgresStore(server.url_for("copy"))
    assert await store.rollouts(RolloutQuery()) == await restored.rollouts(RolloutQuery())
    assert await store.changes() == await restored.changes()
    assert 2 == len(await restored.spans((await restored.rollouts(RolloutQuery()))[0].rollout_id))
    before = await restored.cursor()
    await restored.enqueue([make_rollout()])
    assert before + 1 <= await restored.cursor()
    assert 1 == len(await restored.claim(worker="w"))
    await store.close()
    await restored.close()


def test_dumps_of_a_store_in_shards_come_back_control_server_first(server, binaries: Path, tmp_path: Path) -> None:
    """The store is written to between the dumps, so the shards' dumps are newer than the control server's."""
    names = ("control", "one", "two")
    with server.connect() as connection:
        for name in (*names, *(f"{name}_copy" for name in names)):
            connection.execute(f"CREATE DATABASE {name}")

    def url(suffix: str) -> str:
        control, one, two = (server.url_for(f"{name}{suffix}") for name in names)
        return f"{control.replace(':', '+shards:', 1)}?shards={one},{two}"

    async def body() -> None:
        store = ShardedPostgresStore(url(""))
        for _ in range(6):
            await finish_one(store, spans=2)
        claim = await start_one(store)
        await store.append_spans([make_span(claim, name="before")])
        before = await store.recordings(RolloutQuery(), spans="all")
        for name in names:
            run(
                binaries / "pg_dump",
                "--schema=agl",
                "--format=custom",
                f"--file={tmp_path / name}",
                server.url_for(name),
            )
            await store.append_spans([make_span(claim, name="after")])
            await finish_one(store, spans=2)
        await store.close()
        for name in names:
            run(binaries / "pg_restore", f"--dbname={server.url_for(f'{name}_copy')}", str(tmp_path / name))
        restored = ShardedPostgresStore(url("_copy"))
        assert before == await restored.recordings(RolloutQuery(), spans="all")
        await restored.append_spans([make_span(claim, name="again")])
        assert ["before", "again"] == [span.name for span in await restored.spans(claim.rollout.rollout_id)]
        for _ in range(6):
            done = await finish_one(restored, spans=2)
            assert 2 == len(await restored.spans(done.rollout_id))
        await restored.close()

    asyncio.run(body())


def run(program: Path, *words: str) -> None:
    subprocess.run([program, *words], check=True)
