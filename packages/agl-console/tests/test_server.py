"""The console refuses strangers, restricts the browser in every answer, and notifies pages of changes."""

import asyncio
import base64
import re
import time
from importlib.resources import files

import pytest

from agl.contracts import ExperimentRecord
from agl.errors import ConfigError
from agl.schemas import Json, Rollout, to_json
from agl.stores import MemoryStore
from agl_console.guard import checked_password, host_of, is_loopback

from .conftest import Open

pytestmark = pytest.mark.alone

STATIC_BYTES = 150_000


def basic(credentials: str) -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(credentials.encode()).decode()}"}


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost", "[::1]:80", "console.example", "CONSOLE.example:8000"])
async def test_own_names_are_answered(opened: Open, host: str) -> None:
    async with opened() as client:
        assert 200 == (await client.get("/", headers={"Host": host})).status


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "[", "localhost@evil.example", ""])
@pytest.mark.parametrize("address", ["/", "/static/console.js", "/changes", "/?format=json"])
async def test_other_names_are_refused_everywhere(opened: Open, host: str, address: str) -> None:
    async with opened() as client:
        answer = await client.get(address, headers={"Host": host})
        assert 403 == answer.status
        assert "--allow-host" in await answer.text()


async def test_password_is_asked_for_and_compared(opened: Open) -> None:
    async with opened(password="long enough") as client:
        assert 401 == (await client.get("/")).status
        assert 401 == (await client.get("/static/console.js")).status
        assert 401 == (await client.get("/", headers=basic("me:wrong"))).status
        assert 401 == (await client.get("/", headers={"Authorization": "Basic ###"})).status
        assert 401 == (await client.get("/", headers={"Authorization": "Basic é"})).status
        assert 200 == (await client.get("/", headers=basic("me:long enough"))).status


@pytest.mark.parametrize(
    ("method", "status"), [("POST", 403), ("PUT", 405), ("DELETE", 405), ("PATCH", 405), ("OPTIONS", 405)]
)
async def test_console_only_reads(opened: Open, method: str, status: int) -> None:
    async with opened() as client:
        assert status == (await client.request(method, "/rollouts")).status


@pytest.mark.parametrize("address", ["/", "/nothing", "/?format=json", "/static/console.js"])
async def test_every_answer_forbids_other_sources_and_frames(opened: Open, address: str) -> None:
    async with opened() as client:
        headers = (await client.get(address)).headers
    assert headers["Content-Security-Policy"].startswith("default-src 'self';")
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert "nosniff" == headers["X-Content-Type-Options"]
    assert "Access-Control-Allow-Origin" not in headers


async def test_findings_of_unfinished_runs_are_shown_to_prometheus(opened: Open) -> None:
    def alert(run: str, name: str, *, ago_s: float, kind: str = "suggestion") -> dict[str, bytes]:
        found: Json = {"rule": name, "algorithm": 'gr"po', "step": 3, "evidence": "e", "change": "c"}
        return {f"experiment/{run}/1/alerts/{name}/x": to_json({"kind": kind, "time": now - ago_s, "found": found})}

    store, now = MemoryStore(), time.time()
    live = alert("calc", "silent-groups", ago_s=60) | alert("calc", "collapse", ago_s=5, kind="collapse")
    await store.save_state(live | alert("calc", "older", ago_s=7200), experiment=ExperimentRecord(name="calc"))
    done = ExperimentRecord(name="done", status="finished")
    await store.save_state(alert("done", "workers-idle", ago_s=1), experiment=done)
    async with opened(store, password="long enough") as client:
        assert 401 == (await client.get("/metrics", headers={"Host": "10.1.2.3:8000"})).status
        secret = basic(":long enough")
        answer = await client.get("/metrics", headers={"Host": "10.1.2.3:8000", **secret})
        text = await answer.text()
        assert 403 == (await client.get("/", headers={"Host": "10.1.2.3:8000", **secret})).status
        assert 403 == (await client.get("/metrics", headers={"Host": "evil.example", **secret})).status
    assert "text/plain; version=0.0.4; charset=utf-8" == answer.headers["Content-Type"]
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    labels = 'experiment="calc",run="1",algorithm="gr\\"po",rule="silent-groups",kind="suggestion"'
    assert f"agl_run_finding_time_seconds{{{labels}}} {now - 60:.3f}" in lines
    assert 2 == len(lines)


async def test_finding_that_is_made_again_is_shown_once_with_its_newest_time(opened: Open) -> None:
    found: Json = {"rule": "collapse", "algorithm": "validate", "step": 3, "evidence": "e", "change": ""}
    store, now = MemoryStore(), time.time()
    times = {"5": now - 60, "10": now - 5, "11": now - 30}
    kept = {f"experiment/calc/1/alerts/collapse/{key}": {"kind": "collapse", "time": at} for key, at in times.items()}
    states = {key: to_json({**alert, "found": found}) for key, alert in kept.items()}
    await store.save_state(states, experiment=ExperimentRecord(name="calc"))
    async with opened(store) as client:
        text = await (await client.get("/metrics")).text()
    (line,) = [line for line in text.splitlines() if not line.startswith("#")]
    assert line.endswith(f" {now - 5:.3f}")


async def test_change_is_reported_while_a_page_waits(opened: Open) -> None:
    store = MemoryStore()
    async with opened(store) as client, client.get("/changes") as feed:
        assert "text/event-stream" == feed.headers["Content-Type"]
        await store.enqueue([Rollout(rollout_id="r", task=1)])
        told = await asyncio.wait_for(feed.content.readuntil(b"\n\n"), 60)
    assert re.fullmatch(rb"data: \d+\n\n", told)


async def test_page_asks_once_more_when_changes_have_ended(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_console.server._WAIT_S", 0.05)
    monkeypatch.setattr("agl_console.server._PAUSE_S", 0.0)
    store = MemoryStore()
    async with opened(store) as client, client.get("/changes") as feed:

        async def message() -> bytes:
            return (await asyncio.wait_for(feed.content.readuntil(b"\n\n"), 60))[:1]

        before = [await message() for _ in range(3)]
        await store.enqueue([Rollout(rollout_id="r", task=1)])
        while b"d" != await message():
            pass
        after = [await message() for _ in range(2)]
    assert [b"d", b":", b":"] == before
    assert [b"d", b":"] == after


def test_other_hosts_need_a_password() -> None:
    assert "" == checked_password("127.0.0.1", "")
    assert "secret" == checked_password("0.0.0.0", "secret")
    with pytest.raises(ConfigError, match="AGL_CONSOLE_PASSWORD"):
        checked_password("0.0.0.0", "")


def test_loopback_and_host_names_are_told_apart() -> None:
    assert [True, True, True, False, False] == [
        is_loopback(host) for host in ("127.0.0.2", "::1", "localhost", "0.0.0.0", "console.example")
    ]
    assert ["a", "::1", ""] == [host_of(header) for header in ("A:1", "[::1]:1", "[")]


def test_static_files_are_few_licensed_and_load_nothing_from_elsewhere() -> None:
    static = files("agl_console") / "static"
    texts = {file.name: file.read_text() for file in static.iterdir()}
    assert sum(len(text.encode()) for text in texts.values()) <= STATIC_BYTES
    assert {"htmx-LICENSE.txt", "uPlot-LICENSE.txt"} <= texts.keys()
    own = [texts[name] for name in ("console.js", "console.css")]
    templates = [file.read_text() for file in (files("agl_console") / "templates").iterdir()]
    assert not [text for text in (*own, *templates) if re.search(r"https?://|url\(|@import", text)]
    assert not [text for text in templates if re.search(r"\sstyle=|\son\w+=|\|\s*safe", text)]
