"""A gateway whose PostgreSQL server goes away, and which is itself killed: no call fails, and none is lost."""

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

from agl.contracts import Store, Upstream
from agl.schemas import Rollout, new_rollout_id
from agl.stores import all_spans
from agl_gateway.record.spool_file import spools_for, spools_in
from agl_gateway.service import GatewayService
from agl_gateway.settings import Settings
from agl_run.access.tokens import AttemptTokens
from agl_store_postgres.sharded_store import ShardedPostgresStore
from agl_store_postgres.store import PostgresStore
from agl_testing.model_server import Reply, ScriptedModelServer
from agl_testing.waiting import eventually

SECRET = b"a secret of the tests of a gateway and its store"


async def open_attempt(store: Store) -> tuple[str, str]:
    await store.enqueue([Rollout(rollout_id=new_rollout_id(), task=1)])
    (claim,) = await store.claim(worker="test", lease_s=3600)
    attempt = claim.attempt
    token = AttemptTokens(SECRET).issue(attempt.rollout_id, attempt.attempt_id, expires_at=time.time() + 3600)
    return attempt.attempt_id, token


async def open_attempts(store: Store) -> list[tuple[str, str]]:
    """Open four attempts; in a sharded store, the second and the last are on the shard that goes away."""
    if isinstance(store, PostgresStore):
        return [await open_attempt(store) for _ in range(4)]
    assert isinstance(store, ShardedPostgresStore)
    made: dict[int, list[tuple[str, str]]] = {1: [], 2: []}
    while min(len(made[1]), len(made[2])) < 2:
        attempt_id, token = await open_attempt(store)
        made[store.place(attempt_id.rpartition(".")[0])].append((attempt_id, token))
    return [made[1][0], made[2][0], made[1][1], made[2][1]]


async def ask(session: aiohttp.ClientSession, url: str, token: str, text: str, *, is_streamed: bool = False) -> int:
    """Make one call, read the whole answer, and return the status."""
    body = {"model": "main_llm", "messages": [{"role": "user", "content": text}], "stream": is_streamed}
    headers = {"authorization": f"Bearer {token}"}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
        if not is_streamed or reply.status != 200:
            await reply.read()
            return reply.status
        received = b""
        while b"[DONE]" not in received:
            chunk = await reply.content.readany()
            assert chunk, "the stream ended without its last event"
            received += chunk
        return reply.status


async def stored(store: Store, attempt_ids: list[str]) -> Counter[str]:
    """Return how often the store has a call with each text."""
    found: Counter[str] = Counter()
    for attempt_id in attempt_ids:
        spans = await all_spans(store, attempt_id.rpartition(".")[0], attempt_id)
        found.update(span.call.request["messages"][0]["content"] for span in spans if span.call is not None)
    return found


@pytest.mark.parametrize("away_s", [2.0, pytest.param(60.0, marks=pytest.mark.soak)])
def test_no_call_fails_while_the_server_is_gone(server, url: str, tmp_path: Path, away_s: float) -> None:
    no_call_fails(server, PostgresStore(url), tmp_path, away_s=away_s)


@pytest.mark.parametrize("away_s", [1.0, pytest.param(60.0, marks=pytest.mark.soak)])
def test_no_call_fails_while_a_shard_is_gone(shard_server, two_servers_url: str, tmp_path: Path, away_s: float) -> None:
    no_call_fails(shard_server, ShardedPostgresStore(two_servers_url), tmp_path, away_s=away_s)


def no_call_fails(server, store: Store, tmp_path: Path, *, away_s: float) -> None:
    async def body(backend: ScriptedModelServer) -> None:
        upstream = Upstream(name="main_llm", base_url=backend.base_url, model="scripted")
        gateway = GatewayService(
            store=store,
            upstreams=[upstream],
            tokens=AttemptTokens(SECRET),
            settings=Settings(),
            spools=await spools_for(store, str(tmp_path), shown="postgresql://test"),
        )
        await gateway.start()
        attempts = await open_attempts(store)
        asked: list[str] = []
        statuses: Counter[int] = Counter()
        is_over = asyncio.Event()

        async def call_on(number: int, session: aiohttp.ClientSession) -> None:
            while not is_over.is_set():
                asked.append(text := f"{number}-{len(asked)}")
                is_streamed = len(asked) % 3 == 0
                statuses[await ask(session, gateway.url, attempts[number][1], text, is_streamed=is_streamed)] += 1
                await asyncio.sleep(0.02)

        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            for number in range(3):  # the fourth attempt makes its first call in the outage
                group.create_task(call_on(number, session))
            await eventually(lambda: len(asked) > 10)
            began, count = time.monotonic(), len(asked)
            await asyncio.to_thread(server.stop)
            group.create_task(call_on(3, session))
            await eventually(lambda: not gateway.recorder.spool.is_empty)  # once the outage is noticed
            await asyncio.sleep(away_s)
            await eventually(lambda: len(asked) > count + 40)
            assert away_s - 0.1 < gateway.recorder.pending_s < time.monotonic() - began + 0.1
            assert (
                gateway.recorder.pending
                >= gateway.recorder.spool.calls
                > (20 if isinstance(store, PostgresStore) else 10)
            )
            await asyncio.to_thread(server.start)
            is_over.set()
        assert {200: len(asked)} == statuses
        for attempt_id, _ in attempts:
            await gateway.recorder.settle(attempt_id)
        assert Counter(asked) == await stored(store, [attempt_id for attempt_id, _ in attempts])
        await eventually(lambda: gateway.recorder.pending == 0)
        assert 0 == await gateway.stop()
        await store.close()

    with ScriptedModelServer(default=Reply(text="hello there")) as backend:
        asyncio.run(body(backend))


class Serve:
    """Starts ``agl serve`` on one port with one spool."""

    def __init__(self, folder: Path, store: str, backend: str) -> None:
        self.folder, self.store, self.backend = folder, store, backend
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "agl", "serve", "--store", self.store, "--port", str(self.port)]
        command += ["--upstream", f"main_llm={self.backend}", "--spool", str(self.folder / "spool")]
        environment = {**os.environ, "AGL_TOKEN": "a-token-of-the-tests-0123456789", "AGL_SECRET": SECRET.decode()}
        with (self.folder / "log").open("a") as log:
            process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert process.stdout is not None
        assert "serving" in process.stdout.readline(), (self.folder / "log").read_text()
        return process


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.soak)])
def test_killed_gateway_loses_no_acknowledged_call_while_the_server_comes_and_goes(
    server, url: str, tmp_path: Path, kills: int
) -> None:
    draw = random.Random(7)
    acknowledged: set[str] = set()

    async def call_on(serve: Serve, name: str, token: str) -> None:
        async with aiohttp.ClientSession() as session:
            number = 0
            while True:
                number += 1
                text = f"{name}-{number}"
                with suppress(aiohttp.ClientError, ConnectionError):
                    if await ask(session, serve.url, token, text, is_streamed=number % 2 == 0) == 200:
                        acknowledged.add(text)

    async def body(backend: ScriptedModelServer) -> None:
        serve = Serve(tmp_path, url, backend.base_url)
        store = PostgresStore(url)
        attempts = [await open_attempt(store) for _ in range(6)]
        has_spooled = 0
        for number in range(kills):
            process = await asyncio.to_thread(serve.start)
            tasks = [
                asyncio.create_task(call_on(serve, f"{number}-{at}", token)) for at, (_, token) in enumerate(attempts)
            ]
            before = len(acknowledged)
            await eventually(lambda count=before + 20: len(acknowledged) > count)
            if number % 2 == 0:
                await asyncio.to_thread(server.kill)
                before = len(acknowledged)
                await eventually(lambda count=before + 20: len(acknowledged) > count)
            await asyncio.sleep(draw.uniform(0.0, 0.2))
            process.send_signal(signal.SIGKILL)
            process.communicate()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            has_spooled += sum(found.calls > 0 for found in spools_in(tmp_path / "spool"))
            await asyncio.to_thread(server.start)
        assert 0 < has_spooled, "the server was never away for long enough to need the spool"
        process = await asyncio.to_thread(serve.start)
        await eventually(lambda: all(found.is_busy for found in spools_in(tmp_path / "spool")))
        process.terminate()
        await asyncio.to_thread(process.communicate)
        assert [] == spools_in(tmp_path / "spool"), (tmp_path / "log").read_text()
        counts = await stored(store, [attempt_id for attempt_id, _ in attempts])
        assert set() == acknowledged - counts.keys()
        assert {1} == set(counts.values())
        await store.close()

    with ScriptedModelServer(default=Reply(text="hello there")) as backend:
        asyncio.run(body(backend))
