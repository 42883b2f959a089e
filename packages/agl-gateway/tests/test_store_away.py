"""A store that is briefly unavailable behind a balancer is waited for; a server that is no store is named at once."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import msgspec
import pytest
from aiohttp import web

from agl.errors import StoreError
from agl.schemas import Span, new_rollout_id, new_span_id
from agl_gateway import client
from agl_gateway.client import HttpStore
from agl_gateway.store_api.contract import Fault
from agl_testing.waiting import eventually

from .conftest import ADMIN, listening

HTML = b"<html><h1>Bad Gateway</h1></html>"
BUSY = msgspec.msgpack.encode(Fault(type="StoreError", message="large requests hold all of the memory"))
BROKEN = msgspec.msgpack.encode(Fault(type="StoreError", message="the database fails"))
DELAYS_S = (0.001, 0.002, 0.003)
RESTART_S = (0.004, 0.005)

Answer = tuple[int, bytes, str]
"""Status, body and ``Retry-After`` header of a response."""

AWAY: dict[str, Answer] = {
    "502": (502, HTML, ""),
    "503": (503, HTML, ""),
    "504": (504, b"", ""),
    "503 that names a time": (503, HTML, "0"),
    "503 that names a date": (503, HTML, "Fri, 31 Dec 1999 23:59:59 GMT"),
    "503 of a busy store": (503, BUSY, "0"),
}


class Balancer:
    """Sends the responses in ``answers`` in order, and then the last one again and again."""

    def __init__(self) -> None:
        self.url = ""
        self.answers: list[Answer] = []
        self.asked: list[tuple[str, bytes, float]] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, await request.read(), time.monotonic()))
        status, body, retry_after = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        headers = {"retry-after": retry_after} if retry_after else {}
        return web.Response(status=status, body=body, headers=headers)

    @property
    def tries(self) -> int:
        return len(self.asked)


def result(value: object) -> Answer:
    return 200, msgspec.msgpack.encode(value), ""


@asynccontextmanager
async def balanced(*answers: Answer) -> AsyncIterator[tuple[Balancer, HttpStore]]:
    """Run a balancer with these responses; yields it and a client of the store behind it."""
    balancer = Balancer()
    balancer.answers = list(answers)
    async with listening(balancer.handle) as address:
        store = HttpStore(address, token="t")
        try:
            yield balancer, store
        finally:
            await store.close()


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the delays from half a minute to milliseconds."""
    monkeypatch.setattr(client, "RETRY_DELAYS_S", DELAYS_S)
    monkeypatch.setattr(client, "RESTART_DELAYS_S", RESTART_S)


@pytest.mark.parametrize("away", AWAY.values(), ids=AWAY)
async def test_store_that_is_away_for_a_moment_is_asked_again(away: Answer) -> None:
    async with balanced(away, away, result(7)) as (balancer, store):
        assert 7 == await store.cursor()
        assert 3 == balancer.tries


async def test_write_is_sent_again_as_it_was() -> None:
    span = Span(rollout_id=new_rollout_id(), attempt_id="a.1", span_id=new_span_id(), name="step")
    async with balanced(AWAY["504"], result(None)) as (balancer, store):
        await store.append_spans([span])
    (first, second) = [(path, body) for path, body, _ in balancer.asked]
    assert first == second
    assert "/store/append_spans" == first[0]


async def test_claim_is_sent_again_under_its_id() -> None:
    async with balanced(AWAY["502"], result([])) as (balancer, store):
        assert [] == await store.claim(worker="w")
    ids = [msgspec.msgpack.decode(body)["claim_id"] for _, body, _ in balancer.asked]
    assert [ids[0]] * 2 == ids


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_store_that_stays_away_is_an_error_with_the_status(status: int) -> None:
    async with balanced((status, HTML, "")) as (balancer, store):
        with pytest.raises(StoreError, match=rf"answers HTTP {status} for 'cursor', with '<html>.*agl serve"):
            await store.cursor()
        assert 1 + len(DELAYS_S) == balancer.tries


async def test_store_that_has_answered_is_waited_for_longer() -> None:
    async with balanced(result(7), AWAY["502"]) as (balancer, store):
        assert 7 == await store.cursor()
        with pytest.raises(StoreError, match="HTTP 502"):
            await store.cursor()
        assert 2 + len(DELAYS_S) + len(RESTART_S) == balancer.tries


async def test_busy_store_has_answered_and_its_reason_is_the_error() -> None:
    async with balanced(AWAY["503 of a busy store"]) as (balancer, store):
        with pytest.raises(StoreError, match="HTTP 503 for 'cursor': large requests hold all of the memory"):
            await store.cursor()
        assert 1 + len(DELAYS_S) + len(RESTART_S) == balancer.tries


async def test_pause_is_as_long_as_the_store_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RETRY_DELAYS_S", (0.001, 5.0))
    async with balanced((503, BUSY, "1"), result(7)) as (balancer, store):
        assert 7 == await store.cursor()
        first, second = [at for *_, at in balancer.asked]
        assert 1.0 <= second - first


async def test_pauses_that_the_store_asks_for_last_no_longer_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RETRY_DELAYS_S", (0.1, 0.2, 0.3))
    async with balanced((503, HTML, "3600")) as (balancer, store):
        with pytest.raises(StoreError, match="HTTP 503"):
            await store.cursor()
        times = [at for *_, at in balancer.asked]
    assert 3 == len(times)  # after pauses of 0.3 and 0.3 seconds
    assert all(0.29 <= later - earlier for earlier, later in pairwise(times))


async def test_delete_is_not_sent_again() -> None:
    async with balanced(AWAY["502"], result(1)) as (balancer, store):
        with pytest.raises(StoreError, match="answers HTTP 502 for 'delete'"):
            await store.delete(["r"])
        assert 1 == balancer.tries


@pytest.mark.parametrize("status", [200, 404, 500])
async def test_what_is_no_store_is_named_at_once(status: int) -> None:
    async with balanced((status, HTML, ""), result(7)) as (balancer, store):
        with pytest.raises(StoreError, match=f"HTTP {status} with '<html>.* address of `agl serve`"):
            await store.cursor()
        assert 1 == balancer.tries


async def test_failure_that_the_store_reports_is_raised_at_once() -> None:
    async with balanced((503, BROKEN, ""), result(7)) as (balancer, store):
        with pytest.raises(StoreError, match=r"^the database fails$"):
            await store.cursor()
        assert 1 == balancer.tries


async def test_store_that_is_closed_meanwhile_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RETRY_DELAYS_S", (60.0,))
    async with balanced(AWAY["502"]) as (balancer, store):
        asking = asyncio.create_task(store.cursor())
        await eventually(lambda: balancer.tries)
        await store.close()
        with pytest.raises(StoreError, match="was closed while 'cursor' waited"):
            await asking
        assert 1 == balancer.tries


async def test_large_request_waits_for_the_memory_of_a_busy_gateway(serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RESTART_DELAYS_S", (1.0, 2.0))
    async with serving(max_bodies=1 << 21, bodies_wait_s=0.05) as it:
        held = await it._budget.take(1 << 21)
        store = HttpStore(it.url, token=ADMIN)
        saving = asyncio.create_task(store.save_state({"key": b"x" * (1 << 21)}))
        await asyncio.sleep(0.5)
        assert not saving.done()
        it._budget.give(held)
        await saving
        assert 1 << 21 == len((await store.load_state("key"))["key"])
        await store.close()
