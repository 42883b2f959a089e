"""A gateway in a separate process loses no call when it is killed, stopped, paused or given new keys."""

import asyncio
import logging
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import openai
import pytest

from agl.contracts import RolloutQuery, Upstream
from agl.errors import CaptureError, ConfigError
from agl.schemas import Outcome
from agl_gateway.client import HttpStore
from agl_gateway.embedded import EmbeddedGateway
from agl_gateway.processes.gateway_process import GatewayProcess
from agl_gateway.settings import Settings
from agl_run.access.tokens import PLACEHOLDER_KEY, AttemptTokens
from agl_store_sqlite._store import SQLiteStore
from agl_testing.model_server import Reply, ScriptedModelServer
from agl_testing.waiting import eventually

from .conftest import SECRET, Stage

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows does not pass a socket on")

Apart = Callable[..., AbstractAsyncContextManager[tuple[Stage, GatewayProcess]]]


@pytest.fixture
def apart(server: ScriptedModelServer, tmp_path: Path) -> Apart:
    """Return a factory of stages with a separate process: ``async with apart(health_s=...) as (stage, gateway)``."""

    @asynccontextmanager
    async def make(
        *, secret: Any = SECRET, settings: dict[str, Any] | None = None, **options: Any
    ) -> AsyncIterator[tuple[Stage, GatewayProcess]]:
        url = f"sqlite:///{tmp_path / 'runs.db'}"
        store = SQLiteStore(url)
        gateway = GatewayProcess(
            store_url=url, settings=Settings(**{"spool": str(tmp_path / "spool"), **(settings or {})}), **options
        )
        one = Upstream(name="main_llm", base_url=server.base_url, model="scripted", is_trained=True)
        address = await gateway.start(store=store, upstreams=[one], secret=secret)
        try:
            yield Stage(gateway=gateway, store=store, server=server, url=address), gateway  # type: ignore[arg-type]
        finally:
            await gateway.stop()
            await store.close()

    return make


async def ask(client: openai.AsyncOpenAI, text: str) -> str:
    """Make a model call; returns the answer's id."""
    answer = await client.chat.completions.create(model="main_llm", messages=[{"role": "user", "content": text}])
    return answer.id


async def ended(pid: int) -> None:
    """Wait until the process ``pid`` has ended, or is a zombie."""

    def is_gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    await eventually(is_gone)


async def test_calls_are_recorded_and_the_address_is_one_that_serves_the_store_too(apart):
    async with apart() as (it, gateway):
        assert gateway.pid not in (0, os.getpid())
        assert os.getsid(gateway.pid) == gateway.pid, "a terminal's Ctrl-C reaches it"
        attempt_id, token = await it.open_attempt()
        async with it.openai(token) as client:
            await ask(client, "one")
            await ask(client, "two")
        assert ["one", "two"] == [call.request["messages"][0]["content"] for call in await it.calls(attempt_id)]
        key = it.tokens.issue("", "", expires_at=time.time() + 60, scope="admin")
        store = HttpStore(it.url, token=key)
        await store.finish([Outcome(attempt_id=attempt_id, status="succeeded")])
        assert ["succeeded"] == [each.status for each in await it.store.rollouts(RolloutQuery())]
        await store.close()
        pid = gateway.pid
    await ended(pid)
    assert 0 == gateway.pid


@pytest.mark.long
async def test_kills_lose_no_acknowledged_call_and_the_address_stays(apart):
    async with apart() as (it, gateway):
        attempt_id, token = await it.open_attempt()
        answered: Counter[str] = Counter()
        is_over = False

        async def work(number: int) -> None:
            async with it.openai(token, max_retries=50) as client:
                while not is_over:
                    text = f"{number} {sum(answered.values())}"
                    await ask(client, text)
                    answered[text] += 1

        working = [asyncio.create_task(work(number)) for number in range(4)]
        for kills in range(5):
            before = sum(answered.values())
            await eventually(lambda before=before: sum(answered.values()) >= before + 20)
            os.kill(gateway.pid, signal.SIGKILL)
            await eventually(lambda kills=kills: gateway.restarts == kills + 1)
        before = sum(answered.values())
        await eventually(lambda: sum(answered.values()) >= before + 20)
        is_over = True
        await asyncio.gather(*working)

        recorded = {str(call.request["messages"][0]["content"]) for call in await it.calls(attempt_id)}
        assert set(answered) <= recorded
        assert sum(answered.values()) >= 120


@pytest.mark.long
async def test_end_of_an_attempt_waits_for_the_next_process_and_the_calls_in_its_spool(apart, tmp_path):
    async with apart(settings={"spool_after_s": 0.0}) as (it, gateway):
        attempt_id, token = await it.open_attempt()
        with closing(sqlite3.connect(tmp_path / "runs.db", isolation_level=None)) as other:
            async with it.openai(token) as client:
                await ask(client, "in the store")
                await gateway.settle(attempt_id)
                other.execute("BEGIN IMMEDIATE")  # now the store takes nothing
                await ask(client, "in the spool")
            os.kill(gateway.pid, signal.SIGKILL)
            settling = asyncio.create_task(gateway.settle(attempt_id))
            await eventually(lambda: gateway.restarts == 1)
            assert not settling.done()
            other.execute("ROLLBACK")
            await settling
        found = await it.store.spans(attempt_id.rpartition(".")[0], attempt_id=attempt_id)
        texts = [span.call.request["messages"][0]["content"] for span in found if span.call is not None]
        assert ["in the store", "in the spool"] == texts


@pytest.mark.long
async def test_paused_policy_stays_paused_over_a_kill_and_calls_carry_the_version_of_after_it(apart):
    async with apart() as (it, gateway):
        attempt_id, token = await it.open_attempt()
        async with it.openai(token, max_retries=50) as client:
            await ask(client, "before")
            await gateway.pause("main_llm")
            held = asyncio.create_task(ask(client, "after"))
            await asyncio.sleep(0.3)
            assert not held.done()
            os.kill(gateway.pid, signal.SIGKILL)
            await eventually(lambda: gateway.restarts == 1 and gateway.pid)
            await asyncio.sleep(1.0)
            assert not held.done()
            assert 1 == len(it.server.calls)
            await gateway.resume("main_llm", model_version="v2", model="scripted")
            await held
            os.kill(gateway.pid, signal.SIGKILL)
            await ask(client, "later")
        found = {call.request["messages"][0]["content"]: call.model_version for call in await it.calls(attempt_id)}
        assert {"before": "", "after": "v2", "later": "v2"} == found


@pytest.mark.long
async def test_pause_waits_for_the_calls_under_way(apart, server):
    server.enqueue(Reply(text="late", delay=2.0))
    async with apart() as (it, gateway):
        _, token = await it.open_attempt()
        async with it.openai(token) as client:
            under_way = asyncio.create_task(ask(client, "slow"))
            await eventually(lambda: server.calls)
            began = time.monotonic()
            await gateway.pause("main_llm")
            assert time.monotonic() - began > 1.5
            await under_way
            await gateway.resume("main_llm")


@pytest.mark.long
async def test_process_that_hangs_is_ended_and_started_again(apart, caplog):
    async with apart(health_s=2.0) as (it, gateway):
        attempt_id, token = await it.open_attempt()
        os.kill(gateway.pid, signal.SIGSTOP)
        async with it.openai(token, max_retries=50) as client:
            await ask(client, "waits")
        assert 1 == gateway.restarts
        assert 1 == len(await it.calls(attempt_id))
    assert "does not answer; it is ended" in caplog.text


async def test_stop_does_not_wait_for_the_next_start(apart, caplog, monkeypatch):
    monkeypatch.setattr("agl.owned_process.FIRST_PAUSE_S", 60.0)
    async with apart() as (_, gateway):
        os.kill(gateway.pid, signal.SIGKILL)
        await eventually(lambda: "started again in 30 s" in caplog.text)
        began = time.monotonic()
        await gateway.stop()
        assert time.monotonic() - began < 25


async def test_new_keys_are_accepted_within_seconds(apart):
    keys = [SECRET]
    async with apart(secret=lambda: keys[0]) as (it, _):
        attempt_id, _token = await it.open_attempt()
        keys[0] = b"another secret of these tests"
        rollout_id = attempt_id.rpartition(".")[0]
        token = AttemptTokens(keys[0]).issue(rollout_id, attempt_id, expires_at=time.time() + 600)

        async def is_accepted() -> bool:
            try:
                async with it.openai(token) as client:
                    return bool(await ask(client, "new key"))
            except openai.AuthenticationError:
                return False

        await eventually(is_accepted)


async def test_warnings_of_the_process_are_logged_here(apart, caplog):
    caplog.set_level(logging.WARNING)
    async with apart() as (it, _):
        async with it.openai(PLACEHOLDER_KEY) as client:
            with pytest.raises(openai.AuthenticationError):
                await ask(client, "placeholder")
        await eventually(lambda: "An agent's model call was refused" in caplog.text)


@pytest.mark.long
async def test_error_at_the_start_is_the_one_of_the_process(apart, tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ConfigError, match="spool"):
        async with apart(settings={"spool": str(tmp_path / "taken" / "spool")}):
            pass


async def test_taken_port_is_named(apart):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            async with apart(settings={"port": port}):
                pass


async def test_program_that_cannot_start_is_named_with_its_last_words(apart):
    program = (sys.executable, "-c", "raise SystemExit('no disk')")
    with pytest.raises(CaptureError, match=r"ended with 1: no disk"):
        async with apart(program=program):
            pass


async def test_unknown_policy_is_named(apart):
    async with apart() as (_, gateway):
        with pytest.raises(ConfigError, match=r"no policy 'other'; it serves \['main_llm'\]"):
            await gateway.pause("other")


OWNER = """
import asyncio, os, sys, time
from agl.contracts import Upstream
from agl_gateway.embedded import EmbeddedGateway
from agl_store_sqlite import SQLiteStore

async def main(url, backend, spool):
    gateway = EmbeddedGateway(spool=spool).apart(url, plugins={})
    one = Upstream(name="main_llm", base_url=backend)
    await gateway.start(store=SQLiteStore(url), upstreams=[one], secret=b"a secret of these tests")
    if os.fork() == 0:  # a child that holds everything open, as a data loader's does
        os.close(1)
        time.sleep(60)
    print(gateway.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.long
async def test_process_ends_within_ten_seconds_of_its_killed_owner(server, tmp_path):
    arguments = f"sqlite:///{tmp_path / 'runs.db'}", server.base_url, str(tmp_path / "spool")
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as owner:
        assert owner.stdout is not None
        pid = int(await asyncio.to_thread(owner.stdout.readline))
        owner.kill()
        owner.wait()
        try:
            began = time.monotonic()
            await ended(pid)
            assert time.monotonic() - began < 10
        finally:
            os.killpg(owner.pid, signal.SIGKILL)


def test_settings_pass_on_and_what_cannot_be_has_a_reason(tmp_path):
    gateway = EmbeddedGateway(max_calls=3, spool=str(tmp_path)).apart("sqlite:///runs.db", plugins={})
    assert isinstance(gateway, GatewayProcess)
    with pytest.raises(ConfigError, match="memory of this process"):
        EmbeddedGateway().apart("memory://", plugins={})
    with pytest.raises(ConfigError, match='take away spool = "off"'):
        EmbeddedGateway(spool="off").apart("sqlite:///runs.db", plugins={})
