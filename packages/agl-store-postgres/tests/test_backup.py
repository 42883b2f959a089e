"""A dump that is made while the store is open comes back as a store that goes on where it ended."""

import asyncio
import subprocess
from pathlib import Path

from agl.contracts import RolloutQuery
from agl_store_postgres.store import PostgresStore
from agl_testing.stores.samples import finish_one, make_rollout, start_one


def test_dump_comes_back_and_goes_on(server, binaries: Path, tmp_path: Path) -> None:
    with server.connect() as connection:
        connection.execute("CREATE DATABASE original")
        connection.execute("CREATE DATABASE copy")
    dump = tmp_path / "runs.dump"

    async def body() -> None:
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

    asyncio.run(body())


def run(program: Path, *words: str) -> None:
    subprocess.run([program, *words], check=True)
