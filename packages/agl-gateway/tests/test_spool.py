"""Calls survive a store that is slow, away, full or refusing, and a gateway that ends."""

import asyncio
import re
import sqlite3
import time
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import aiohttp
import pytest

from agl.errors import StoreError
from agl.schemas import Outcome, Rollout, Span, new_rollout_id
from agl.stores import MemoryStore
from agl_gateway.client import HttpStore
from agl_gateway.processes.announcement import GATEWAYS, gateways_of, gone_gateways
from agl_gateway.record import outage as outages
from agl_gateway.record import spool as spools
from agl_gateway.record.spool_file import SpoolBusyError, SpoolFile, folder_of, spools_for, spools_in
from agl_gateway.service import GatewayService
from agl_gateway.store_api import feed
from agl_run.access.tokens import AdminKey
from agl_run.worker.remote_gateway import RemoteGateway
from agl_store_sqlite._store import SQLiteStore
from agl_testing.waiting import eventually

from .conftest import ADMIN, SECRET


class FickleStore(MemoryStore):
    """A store that a test can make unavailable, slow, or refuse the spans of some attempts."""

    def __init__(self) -> None:
        super().__init__()
        self.is_gone = False
        self.takes = asyncio.Event()
        self.takes.set()
        self.refused: set[str] = set()
        self.appends = 0

    async def append_spans(self, spans: Sequence[Span]) -> None:
        self._check()
        self.appends += 1
        await self.takes.wait()
        if any(span.attempt_id in self.refused for span in spans):
            raise StoreError("the table for these spans is read-only")
        await super().append_spans(spans)

    async def cursor(self) -> int:
        self._check()
        return await super().cursor()

    async def changes(self, *, after: int = 0, limit: int = 1000, wait_s: float = 0.0):
        self._check()
        return await super().changes(after=after, limit=limit, wait_s=min(wait_s, 0.1))

    async def attempts(self, rollout_id: str):
        self._check()
        return await super().attempts(rollout_id)

    async def rollouts(self, query):
        self._check()
        return await super().rollouts(query)

    async def announce(self, presence, **rest) -> None:
        self._check()
        await super().announce(presence, **rest)

    def _check(self) -> None:
        if self.is_gone:
            raise StoreError("nobody answers")


class StalledStore(MemoryStore):
    """A store whose server hangs: while ``answers`` is cleared, it neither answers nor fails."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self.answers.set()
        self.probes = 0

    async def cursor(self) -> int:
        self.probes += 1
        await self.answers.wait()
        return await super().cursor()

    async def changes(self, *, after: int = 0, limit: int = 1000, wait_s: float = 0.0):
        await self.answers.wait()
        return await super().changes(after=after, limit=limit, wait_s=min(wait_s, 0.01))

    async def rollouts(self, query):
        await self.answers.wait()
        return await super().rollouts(query)


async def open_attempt(it: GatewayService) -> tuple[str, str]:
    await it.store.enqueue([Rollout(rollout_id=new_rollout_id(), task=1)])
    (claim,) = await it.store.claim(worker="test", lease_s=600)
    attempt = claim.attempt
    return attempt.attempt_id, it.tokens.issue(attempt.rollout_id, attempt.attempt_id, expires_at=time.time() + 600)


async def call(it: GatewayService, token: str, text: str = "hi", **body: object) -> tuple[int, str, Mapping[str, str]]:
    """Make a call through the gateway; returns status, text and headers of the response."""
    asked = {"model": "main_llm", "messages": [{"role": "user", "content": text}], **body}
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {token}"}) as session,
        session.post(f"{it.url}/v1/chat/completions", json=asked) as reply,
    ):
        return reply.status, await reply.text(), reply.headers


async def texts(store: MemoryStore, attempt_id: str) -> list[str]:
    """Return the questions in the attempt's stored calls, in the order of the store."""
    found = await store.spans(attempt_id.rpartition(".")[0], attempt_id=attempt_id)
    return [span.call.request["messages"][0]["content"] for span in found if span.call is not None]


async def gauges(it: GatewayService) -> dict[str, float]:
    async with aiohttp.ClientSession() as session, session.get(f"{it.url}/metrics") as answer:
        return {
            name: float(value) for name, value in re.findall(r"^(agl_\w+) (\S+)$", await answer.text(), re.MULTILINE)
        }


async def test_store_that_is_gone_costs_no_call_and_gets_each_once(serving, tmp_path, caplog):
    store = FickleStore()
    async with serving(store=store, spool=tmp_path) as it:
        known, token = await open_attempt(it)
        new, new_token = await open_attempt(it)
        assert 200 == (await call(it, token, "before"))[0]
        store.is_gone = True
        numbers = [str(number) for number in range(20)]
        answers = [await call(it, token, number) for number in numbers]
        answers += [await call(it, new_token, number, stream=True) for number in numbers]
        assert {200} == {status for status, *_ in answers}
        assert (200, "spooling") == await health(it)
        seen = await gauges(it)
        assert (40.0, 40.0) == (seen["agl_span_queue_length"], seen["agl_spool_length"])
        assert 40 * 200 < seen["agl_span_queue_bytes"]
        assert 0.0 < seen["agl_span_queue_age_seconds"] < 200
        settled = asyncio.create_task(it.recorder.settle(known))
        await asyncio.sleep(0.1)
        assert not settled.done()
        store.is_gone = False
        await settled
        await it.recorder.settle(new)
        assert ["before", *numbers] == await texts(store, known)
        assert numbers == await texts(store, new)
        seen = await gauges(it)
        assert (0.0, 0.0, 0.0) == (
            seen["agl_span_queue_length"],
            seen["agl_span_queue_bytes"],
            seen["agl_span_queue_age_seconds"],
        )
        assert 0.0 == seen["agl_spans_lost_total"]
    assert "the store's change feed failed; trying again: nobody answers" in caplog.text
    assert "Traceback" not in caplog.text


async def health(it: GatewayService) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"{it.url}/healthz") as answer:
        return answer.status, (await answer.json())["status"]


async def test_store_that_hangs_delays_neither_health_nor_the_refusal_of_a_conversation(serving, tmp_path, monkeypatch):
    monkeypatch.setattr(outages, "_PATIENCE_S", 0.02)
    monkeypatch.setattr(outages, "_PROBE_S", 0.05)
    store = StalledStore()
    async with serving(store=store, spool=tmp_path, client_key="k" * 16) as it:
        assert (200, "ok") == await health(it)
        assert 200 == (await call(it, "k" * 16, "known"))[0]
        store.answers.clear()
        async with asyncio.timeout(30):
            status, text, headers = await call(it, "k" * 16, "new")
            assert (200, "spooling") == await health(it)
            assert 200 == (await call(it, "k" * 16, "known"))[0]
        assert (503, "5") == (status, headers["retry-after"])
        assert "the gateway's store does not answer" in text
        store.answers.set()
        await eventually(lambda: not it.recorder.outage.is_on)
        assert 200 == (await call(it, "k" * 16, "new"))[0]


@pytest.mark.parametrize("has_spool", [True, False])
async def test_health_request_neither_asks_the_store_nor_begins_an_outage(serving, tmp_path, monkeypatch, has_spool):
    monkeypatch.setattr(outages, "_PROBE_S", 0.05)
    store = StalledStore()
    async with serving(store=store, **({"spool": tmp_path} if has_spool else {})) as it:
        store.answers.clear()
        before = store.probes
        async with asyncio.timeout(30):
            assert [(200, "ok")] * 3 == [await health(it) for _ in range(3)]
        assert (before, False) == (store.probes, it.recorder.outage.is_on)


@pytest.mark.parametrize(("has_spool", "expected"), [(True, (200, "spooling")), (False, (503, "failing"))])
async def test_health_follows_a_store_that_hangs_without_any_call(serving, tmp_path, monkeypatch, has_spool, expected):
    monkeypatch.setattr(outages, "_PROBE_S", 0.05)
    monkeypatch.setattr(feed, "_WAIT_S", 0.05)
    monkeypatch.setattr(feed, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(feed, "_AFTER_FAILURE_S", 0.05)
    store = StalledStore()
    async with serving(store=store, **({"spool": tmp_path} if has_spool else {})) as it:

        async def is_health(wanted: tuple[int, str]) -> bool:
            return wanted == await health(it)

        store.answers.clear()
        await eventually(lambda: is_health(expected))
        store.answers.set()
        await eventually(lambda: is_health((200, "ok")))


async def test_gauges_follow_the_queue_within_a_second(serving, tmp_path):
    """The number of calls and bytes is right once a call is answered, and the age within a second."""
    store = FickleStore()
    async with serving(store=store, spool=tmp_path) as it:
        attempt_id, token = await open_attempt(it)
        store.is_gone = True
        begun = answered = time.monotonic()
        sizes = list[float]()
        for count in range(1, 6):
            assert 200 == (await call(it, token, "x" * 1000 * count))[0]
            answered = time.monotonic() if count == 1 else answered
            asked, seen, ended = time.monotonic(), await gauges(it), time.monotonic()
            assert (float(count), float(count)) == (seen["agl_span_queue_length"], seen["agl_spool_length"])
            # the first call waits since a moment between its beginning and its answer
            assert asked - answered - 1.0 <= seen["agl_span_queue_age_seconds"] <= ended - begun + 1.0
            sizes.append(seen["agl_span_queue_bytes"])
        assert all(1000 * count < size for count, size in enumerate(sizes, start=1))
        assert sizes == sorted(set(sizes))
        store.is_gone = False
        await it.recorder.settle(attempt_id)
        assert 5 == len(await texts(store, attempt_id))
        seen = await gauges(it)
        names = ("agl_span_queue_length", "agl_span_queue_bytes", "agl_span_queue_age_seconds", "agl_spool_length")
        assert dict.fromkeys(names, 0.0) == {name: seen[name] for name in names}


async def test_slow_store_delays_no_answer_and_gets_no_span_twice(serving, tmp_path):
    store = FickleStore()
    async with serving(store=store, spool=tmp_path) as it:
        attempt_id, token = await open_attempt(it)
        store.takes.clear()
        assert 200 == (await call(it, token, "one"))[0]
        assert 1 == it.recorder.spool.calls
        store.takes.set()
        await it.recorder.settle(attempt_id)
        assert ["one"] == await texts(store, attempt_id)
        assert 1 == store.appends


async def test_quick_store_takes_calls_without_the_spool(serving, tmp_path):
    store = FickleStore()
    async with serving(store=store, spool=tmp_path) as it:
        attempt_id, token = await open_attempt(it)
        assert 200 == (await call(it, token, "one"))[0]
        assert ["one"] == await texts(store, attempt_id)  # the answer came after the call was stored
        assert [0] == [len(it.recorder.spool.file.content().attempts)]


@pytest.mark.parametrize("limit", ["calls", "bytes"])
async def test_full_spool_refuses_calls_before_the_model_is_asked(serving, server, tmp_path, limit):
    store = FickleStore()
    async with serving(store=store, spool=tmp_path) as it:
        _, token = await open_attempt(it)
        spool = it.recorder.spool
        if limit == "calls":
            spool.max_calls = 2
        else:
            spool.max_bytes = 1
        store.is_gone = True
        kept = 2 if limit == "calls" else 1
        assert {200} == {(await call(it, token))[0] for _ in range(kept)}
        status, text, headers = await call(it, token)
        assert (429, "5", "true") == (status, headers["retry-after"], headers["x-should-retry"])
        assert "the model was not asked" in text
        assert kept == len(server.calls)
        store.is_gone = False
        await eventually(lambda: spool.is_empty)
        assert 200 == (await call(it, token))[0]


async def test_full_disk_refuses_calls_only_while_the_spool_is_needed(serving, server, tmp_path, monkeypatch):
    monkeypatch.setattr(spools, "_MIN_FREE_BYTES", 1 << 62)
    store = FickleStore()
    async with serving(store=store, spool=tmp_path) as it:
        _, token = await open_attempt(it)
        assert 200 == (await call(it, token))[0]
        store.is_gone = True
        assert 200 == (await call(it, token))[0]
        status, text, headers = await call(it, token)
        assert (503, "5") == (status, headers["retry-after"])
        assert "make room there" in text
        assert str(it.spool_path) in text
        assert 2 == len(server.calls)


async def test_call_that_neither_store_nor_spool_takes_is_not_acknowledged(serving, tmp_path):
    store = FickleStore()
    async with serving(store=store, spool=tmp_path) as it:
        attempt_id, token = await open_attempt(it)
        it.recorder.spool.file._db.execute("PRAGMA max_page_count = 1")
        store.is_gone = True
        large = "x" * 100_000
        waiting = asyncio.create_task(call(it, token, large))
        await eventually(lambda: it.recorder.spool._fault)
        status, text, _ = await call(it, token)
        assert 503 == status
        assert "database or disk is full" in text
        assert not waiting.done()
        store.is_gone = False
        assert 200 == (await waiting)[0]
        assert [large] == await texts(store, attempt_id)


async def test_gateway_drains_at_its_start_what_the_last_one_left(serving, tmp_path):
    store = FickleStore()
    async with serving(store=store, spool=tmp_path) as it:
        attempt_id, token = await open_attempt(it)
        first_id = it.recorder.spool.gateway_id
        store.is_gone = True
        assert 200 == (await call(it, token, "one"))[0]
        it.recorder.spool._is_stopping = True  # the drain need not try for long
    (left,) = spools_in(tmp_path)
    assert (1, False, "memory://") == (left.calls, left.is_busy, left.store_url)
    store.is_gone = False
    async with serving(store=store, spool=tmp_path) as it:
        await it.recorder.settle(attempt_id)
        assert ["one"] == await texts(store, attempt_id)
        assert first_id == it.recorder.spool.gateway_id
    assert [] == spools_in(tmp_path)


async def test_gateways_on_one_store_have_spools_of_their_own_and_drain_those_of_the_gone(serving, tmp_path):
    store = FickleStore()
    async with serving(store=store, spool=tmp_path) as one, serving(store=store, spool=tmp_path) as two:
        assert one.spool_path != two.spool_path
        (first, token), (second, other) = await open_attempt(one), await open_attempt(two)
        store.is_gone = True
        assert 200 == (await call(one, token, "one"))[0]
        assert 200 == (await call(two, other, "two"))[0]
        assert [(True, 0)] * 2 == [(found.is_busy, found.calls) for found in spools_in(tmp_path)]
    assert [1, 1] == [found.calls for found in spools_in(tmp_path)]
    store.is_gone = False
    async with serving(store=store, spool=tmp_path) as it:
        await it.recorder.settle(first)
        await it.recorder.settle(second)
    assert (["one"], ["two"]) == (await texts(store, first), await texts(store, second))
    assert [] == spools_in(tmp_path)


async def _announced(store, count: int) -> bool:
    return len(await store.presences(GATEWAYS)) == count


async def test_attempt_that_ends_at_one_gateway_waits_for_the_calls_at_another(serving, tmp_path):
    store = FickleStore()
    sharing = {"store": store, "spool": tmp_path, "is_shared": True}
    async with serving(**sharing) as one, serving(**sharing) as two:
        await eventually(lambda: _announced(store, 2))
        attempt_id, token = await open_attempt(one)
        store.takes.clear()
        assert 200 == (await call(one, token, "one"))[0]
        remote = HttpStore(two.url, token=ADMIN)
        finishing = asyncio.create_task(remote.finish([Outcome(attempt_id=attempt_id, status="succeeded")]))
        await asyncio.sleep(0.3)
        assert not finishing.done()
        store.takes.set()
        (rollout,) = await finishing
        assert "succeeded" == rollout.status
        assert [False] == [span.is_late for span in await store.spans(rollout.rollout_id, attempt_id=attempt_id)]
        await remote.close()


async def test_gateway_that_lives_and_cannot_be_asked_fails_the_end_of_an_attempt_with_advice(
    serving, tmp_path, monkeypatch
):
    monkeypatch.setattr("agl_gateway.processes.peers._PATIENCE_S", 0.0)
    store = FickleStore()
    sharing = {"store": store, "spool": tmp_path, "is_shared": True}
    async with serving(**sharing, advertise="127.0.0.1") as one, serving(**sharing) as two:
        one.advertised = "http://127.0.0.1:9"
        await one._presence._announce()
        attempt_id, _ = await open_attempt(two)
        with pytest.raises(Exception, match="with --advertise"):
            await two.peers.settle(attempt_id)


async def test_spool_of_another_store_is_left_alone(serving, tmp_path):
    store, other = FickleStore(), FickleStore()
    async with serving(store=store, spool=tmp_path) as it:
        _, token = await open_attempt(it)
        store.is_gone = True
        assert 200 == (await call(it, token))[0]
    (left,) = spools_in(tmp_path)
    async with serving(store=other, spool=tmp_path) as it:
        assert left.path != it.spool_path
        with pytest.raises(Exception, match="belongs to the store memory://, which is another one"):
            SpoolFile(left.path, store_id="another", store_url="memory://")
    assert [left] == spools_in(tmp_path)


async def test_spans_that_the_store_never_takes_are_set_aside_with_the_reason(serving, tmp_path):
    store = FickleStore()
    async with serving(store=store, spool=tmp_path) as it:
        attempt_id, token = await open_attempt(it)
        kept, other = await open_attempt(it)
        store.is_gone = True
        assert 200 == (await call(it, token, "gone"))[0]
        assert 200 == (await call(it, other, "kept"))[0]
        store.is_gone = False
        await store.finish([Outcome(attempt_id=attempt_id, status="failed")])
        await store.delete([attempt_id.rpartition(".")[0]])
        with pytest.raises(Exception, match="are not in the store: unknown"):
            await it.recorder.settle(attempt_id)
        await it.recorder.settle(kept)
        assert ["kept"] == await texts(store, kept)
        assert 1 == it.recorder.lost
    (found,) = spools_in(tmp_path)
    assert (0, 1) == (found.calls, found.refused)
    with sqlite3.connect(found.path) as db:
        ((reason,),) = db.execute("SELECT reason FROM refused").fetchall()
    assert "unknown" in reason


async def test_attempt_whose_spans_are_refused_for_now_delays_no_other_and_is_stored_in_the_end(
    serving, tmp_path, monkeypatch
):
    monkeypatch.setattr(spools, "_DEFER_S", 0.005)
    store = FickleStore()
    async with serving(store=store, spool=tmp_path) as it:
        troubled, token = await open_attempt(it)
        well, other = await open_attempt(it)
        store.refused.add(troubled)
        assert 200 == (await call(it, token, "one"))[0]
        assert 200 == (await call(it, other, "two"))[0]
        await it.recorder.settle(well)
        assert ["two"] == await texts(store, well)
        with pytest.raises(Exception, match="is read-only"):
            await it.recorder.settle(troubled)
        store.refused.clear()
        await eventually(lambda: it.recorder.spool.is_empty)
        assert ["one"] == await texts(store, troubled)
        assert 0 == it.recorder.lost


async def test_late_calls_of_a_lost_attempt_do_not_change_its_outcome(serving, tmp_path):
    store = FickleStore()
    async with serving(store=store, spool=tmp_path) as it:
        attempt_id, token = await open_attempt(it)
        store.is_gone = True
        assert 200 == (await call(it, token))[0]
        store.is_gone = False
        await MemoryStore.finish(store, [Outcome(attempt_id=attempt_id, status="lost")])
        await eventually(lambda: it.recorder.spool.is_empty)
        rollout_id = attempt_id.rpartition(".")[0]
        (attempt,) = await store.attempts(rollout_id)
        (span,) = await store.spans(rollout_id, attempt_id=attempt_id)
        assert ("lost", True) == (attempt.status, span.is_late)


async def test_gateway_that_is_gone_with_calls_is_named_to_the_next(serving, tmp_path, caplog):
    store = FickleStore()
    async with serving(store=store, spool=tmp_path / "a") as it:
        _, token = await open_attempt(it)
        await eventually(lambda: _announced(store, 1))
        store.is_gone = True
        assert 200 == (await call(it, token))[0]
        store.takes.clear()
        store.is_gone = False
        await it._presence._announce(is_ended=True)
        own = it.recorder.spool.gateway_id
        store.is_gone = True
    store.is_gone = False
    store.takes.set()
    async with serving(store=store, spool=tmp_path / "b"):
        await eventually(lambda: "held 1 calls" in caplog.text)
        assert [own] == [found.member for found in await gone_gateways(store)]
        assert 2 == len(await gateways_of(store))
    assert [own] == [presence.member for presence in await store.presences(GATEWAYS)]


async def test_settle_over_http_says_that_the_gateway_waits(serving, tmp_path, monkeypatch):
    monkeypatch.setattr("agl_gateway.store_api.workers._SETTLE_S", 0.2)
    store = FickleStore()
    async with serving(store=store, spool=tmp_path) as it:
        attempt_id, token = await open_attempt(it)
        store.is_gone = True
        assert 200 == (await call(it, token))[0]
        headers = {"authorization": f"Bearer {token}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            async with session.post(f"{it.url}/settle", json={"attempt_id": attempt_id}) as answer:
                assert 202 == answer.status
                assert it.recorder.spool.gateway_id == (await answer.json())["gateway"]
            store.is_gone = False
            await it.recorder.settle(attempt_id)
            async with session.post(f"{it.url}/settle", json={"attempt_id": attempt_id}) as answer:
                assert 200 == answer.status


async def test_worker_goes_on_with_a_gateway_that_lost_nothing_and_knows_that_calls_were_cut_off(
    serving, tmp_path, monkeypatch
):
    monkeypatch.setattr("agl_gateway.store_api.workers._SETTLE_S", 0.2)
    store = FickleStore()
    async with serving(store=store, spool=tmp_path) as it:
        port = urlsplit(it.url).port
        remote = RemoteGateway(it.url, key=AdminKey(SECRET), patience_s=0.0)
        attempt_id, token = await open_attempt(it)
        assert "" == await remote.look()
        store.is_gone = True
        assert 200 == (await call(it, token))[0]
        began = time.monotonic()
    store.is_gone = False
    store.takes.clear()
    async with serving(store=store, spool=tmp_path, port=port):
        assert not remote.failed_since(began)
        settled = asyncio.create_task(remote.settle(attempt_id))
        await eventually(lambda: remote.failed_since(began))  # the first answer says that it waits
        assert not settled.done()
        store.takes.set()
        await settled
        assert not remote.lost.is_set()
    assert ["hi"] == await texts(store, attempt_id)


def test_spool_is_used_where_the_store_is_not_in_this_process(tmp_path):
    assert folder_of("", MemoryStore()) is None
    assert tmp_path == folder_of(str(tmp_path), MemoryStore())

    class Far:
        pass

    assert "spool" == folder_of("", Far()).name
    assert folder_of("off", Far()) is None


async def test_spool_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match="Choose a folder"):
        await spools_for(MemoryStore(), str(tmp_path / "file" / "below"), shown="memory://")


async def test_store_keeps_its_identity_for_all_who_ask(tmp_path):
    async with asyncio.TaskGroup() as group:
        store = SQLiteStore(f"sqlite:///{tmp_path / 'runs.db'}")
        asked = [group.create_task(spools_for(store, str(tmp_path / str(n)), shown="x")) for n in range(4)]
    found = [task.result()[0] for task in asked]
    assert 1 == len({file.path.name for file in found})
    with pytest.raises(SpoolBusyError):
        SpoolFile(found[0].path, store_id="x", store_url="x")
    for file in found:
        file.close()
    await store.close()


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a gateway that stops give up on the store quickly."""
    monkeypatch.setattr("agl_gateway.record.recorder._SPOOL_STOP_S", 0.3)


async def test_age_of_the_queue_is_that_of_its_oldest_call(serving):
    """Calls that were queued later, but are stored already, do not change the oldest call's age."""
    store = FickleStore()
    async with serving(store=store) as it:
        stuck, token = await open_attempt(it)
        stored, other_token = await open_attempt(it)
        store.refused.add(stuck)
        await call(it, token)
        begun = time.monotonic()
        while time.monotonic() - begun < 0.2:
            await call(it, other_token)
            await it.recorder.settle(stored)
        assert time.monotonic() - begun <= it.recorder.pending_s
        store.refused.clear()
        await it.recorder.settle(stuck)
        assert 0.0 == it.recorder.pending_s
