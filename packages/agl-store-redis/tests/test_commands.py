"""The commands of ``agl`` and the server of ``agl-gateway`` work with this store as with others."""

import asyncio
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agl import semconv
from agl.contracts import RolloutQuery, Store
from agl.errors import NotFoundError
from agl.schemas import Rollout
from agl.stores import is_readable, read_recordings
from agl_gateway.client import HttpStore
from agl_store_redis.store import RedisStore
from agl_store_sqlite._store import SQLiteStore
from agl_testing.stores.samples import make_rollout, make_span, outcome_of

from .conftest import Server

AGENT = '''
def solve(task):
    """The answer's reward."""
    return float(task["n"] * 2 == 4)
'''
EXPERIMENT = """
[experiment]
name = "doubles"
agent = "redis_doubles_agent:solve"
store = "URL"
train = "tasks.jsonl"
"""


def agl(folder: Path, *words: str) -> str:
    """Return the output of a command, after checking that the command succeeded."""
    command = [sys.executable, "-m", "agl", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert 0 == done.returncode, done.stderr + done.stdout
    return done.stdout


@pytest.mark.long
def test_commands_work_on_the_store(url: str, tmp_path: Path) -> None:
    (tmp_path / "redis_doubles_agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('{"n": 2}\n{"n": 3}\n')
    (tmp_path / "doubles.toml").write_text(EXPERIMENT.replace("URL", url))
    agl(tmp_path, "run", "doubles.toml")
    assert 2 == agl(tmp_path, "runs", "--store", url).count("succeeded")
    assert "succeeded" in agl(tmp_path, "show", "latest", "--store", url)
    agl(tmp_path, "data", "copy", url, "copy.db")
    agl(tmp_path, "data", "copy", "copy.db", f"{url}_back")
    first, copied, back = RedisStore(url), SQLiteStore(f"sqlite:///{tmp_path}/copy.db"), RedisStore(f"{url}_back")
    assert asyncio.run(contents(first)) == asyncio.run(contents(copied)) == asyncio.run(contents(back))


async def contents(store: Store) -> list[object]:
    recordings = [each async for each in read_recordings(store, RolloutQuery(), spans="all")]
    assert 2 == len(recordings)
    rest = [await store.experiments(), await store.load_state(""), await store.metrics("doubles")]
    await store.close()
    return [recordings, *rest]


def test_server_of_the_gateway_serves_the_store(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_TOKEN", "an-admin-token-of-the-tests")
    command = [sys.executable, "-m", "agl", "serve", "--store", url, "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stdout is not None
            address = next(found for line in serving.stdout if (found := re.search(r"http://[\d.]+:\d+", line)))
            asyncio.run(use(HttpStore(address[0])))
        finally:
            serving.send_signal(signal.SIGINT)
            serving.wait(60)
    asyncio.run(check(RedisStore(url)))


async def use(store: HttpStore) -> None:
    """Claim a rollout by a request that waits until another request enqueues it, then finish the rollout."""
    waiting = asyncio.create_task(store.claim(worker="w", wait_s=60))
    await store.enqueue([make_rollout()])
    (claim,) = await waiting
    await store.finish([outcome_of(claim, spans=[make_span(claim)])])
    await store.close()


async def check(store: RedisStore) -> None:
    (rollout,) = await store.rollouts(RolloutQuery())
    assert ("succeeded", 1) == (rollout.status, len(await store.spans(rollout.rollout_id)))
    await store.close()


async def test_damaged_records_hide_no_others(server: Server, url: str) -> None:
    store = RedisStore(url)
    await store.enqueue([Rollout(rollout_id=f"ro-{number}", task=number) for number in range(4)])
    claims = await store.claim(worker="w", limit=4)
    await store.append_spans([make_span(claim) for claim in claims for _ in range(3)])
    for key in server.run("KEYS", "*r/ro-0"):
        server.run("HSET", key, "d", b"\xc1")
    for key in server.run("KEYS", "*s/ro-1/1"):
        server.run("LSET", key, 1, server.run("LINDEX", key, 1)[:4] + b"\xc1")
    for key in server.run("KEYS", "*r/ro-2"):
        server.run("HSET", key, "1", b"\xc1")
    for query in (RolloutQuery(limit=1), RolloutQuery(experiment="", status=("running",))):
        recordings = [each async for each in read_recordings(store, query, spans="all")]
        assert ["ro-1", "ro-2", "ro-3"] == [each.rollout.rollout_id for each in recordings]
        assert [["work", semconv.UNREADABLE, "work"], *[["work"] * 3] * 2] == [
            [span.name for span in each.spans] for each in recordings
        ]
        assert [False, False, True] == [is_readable(each) for each in recordings]
    await store.close()


async def test_rollouts_with_damaged_progress_stop_nothing_and_are_removed(server: Server, url: str) -> None:
    store = RedisStore(url)
    await store.enqueue([Rollout(rollout_id=f"ro-{number}", task=number) for number in range(5)])
    await store.append_spans([make_span(each) for each in await store.claim(worker="w", limit=2, lease_s=0.2)])
    for command in (("HSET", "ro-0", "p", b"\xc1"), ("HSET", "ro-2", "p", b"7"), ("HDEL", "ro-4", "p")):
        for key in server.run("KEYS", f"*r/{command[1]}"):
            server.run(command[0], key, *command[2:])
    await asyncio.sleep(0.4)
    claims = await store.claim(worker="w", limit=9)
    assert ["ro-1", "ro-3"] == [claim.rollout.rollout_id for claim in claims]
    with pytest.raises(NotFoundError, match="the record of rollout 'ro-0' cannot be read"):
        await store.cancel(["ro-0"])
    assert 3 == await store.delete(["ro-0", "ro-2", "ro-4"])
    assert ["ro-1", "ro-3"] == [each.rollout_id for each in await store.rollouts(RolloutQuery())]
    await store.enqueue([Rollout(rollout_id="ro-0", task=0)])
    (again,) = await store.claim(worker="w")
    await store.append_spans([make_span(again)])
    assert 1 == len(await store.spans("ro-0"))
    await store.close()


async def test_rollout_behind_many_damaged_ones_is_claimed_in_few_steps(server: Server, url: str) -> None:
    store = RedisStore(url)
    await store.enqueue([Rollout(rollout_id=f"ro-{number:03}", task=number) for number in range(201)])
    for key in server.run("KEYS", "*r/ro-*"):
        if not key.endswith(b"ro-200"):
            server.run("HSET", key, "d", b"\xc1")
    before = commands(server)
    (claim,) = await store.claim(worker="w")
    assert "ro-200" == claim.rollout.rollout_id
    await store.enqueue([Rollout(rollout_id="ro-last", task=1)])
    await store.claim(worker="w")
    assert 0 < commands(server) - before < 30
    await store.close()


def commands(server: Server) -> int:
    """Return the number of scripts that the server has run."""
    found = server.run("INFO", "commandstats")
    return sum(each["calls"] for name, each in found.items() if name.startswith(("cmdstat_eval", "cmdstat_fcall")))
