"""The gateway's small components: registration, counters, the gate, traces, the OpenAPI document."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agl import PluginManager
from agl.contracts import Change, Store
from agl.errors import AglError, FencedError, NotFoundError, StoreError
from agl.schemas import Outcome, Rollout, new_rollout_id
from agl.served_calls import CallGate
from agl.stores import MemoryStore
from agl_gateway.client import HttpStore
from agl_gateway.embedded import EmbeddedGateway
from agl_gateway.relay.callers import span_id_of, trace_of
from agl_gateway.status.api import render
from agl_gateway.status.openapi import openapi_document
from agl_gateway.store_api import feed as feeds
from agl_gateway.store_api.contract import METHODS, Fault, error_of, fault_of
from agl_gateway.store_api.feed import Feed, QueueLength
from agl_testing.waiting import eventually


def test_plugin_registers_gateway_stores_and_command():
    manager = PluginManager.from_environment()
    assert isinstance(manager.build(manager.gateway("gateway")), EmbeddedGateway)
    assert isinstance(manager.build(manager.store_entry("http"), url="http://:t@h:1"), HttpStore)
    assert "serve" == manager.command("serve").name


def test_plugin_module_imports_no_server():
    code = "import sys, agl_gateway.plugin; sys.exit('aiohttp' in sys.modules or 'google.protobuf' in sys.modules)"
    assert 0 == subprocess.run([sys.executable, "-c", code], check=False).returncode


def test_every_method_of_the_contract_is_served_and_described():
    contract = {name for name in vars(Store) if not name.startswith("_")} - {"close"}
    assert contract == set(METHODS)
    document = openapi_document()
    assert {f"/store/{name}" for name in contract} <= set(document["paths"])
    assert all(callable(getattr(HttpStore, name)) for name in contract)


@pytest.mark.parametrize(
    "error", [NotFoundError("rollout", "ro-1", "look again"), FencedError("late"), StoreError("x")]
)
def test_errors_survive_the_wire(error: AglError):
    again = error_of(fault_of(error))
    assert (type(error), str(error)) == (type(again), str(again))


def test_fault_of_a_newer_release_is_a_store_error():
    assert isinstance(error_of(Fault(type="BrandNewError", message="m")), StoreError)


def test_metrics_escape_policy_names():
    text = render([("agl_x", "gauge", "Help.", {'a"b\\c': 1.0}), ("agl_y", "counter", "Help.", 2)])
    large = 123_456_789
    counted = render([("agl_x", "counter", "Help.", {"a": large}), ("agl_y", "counter", "Help.", large)])
    assert 2 == counted.count(f" {large}\n")
    assert 'agl_x{policy="a\\"b\\\\c"} 1\n' in text
    assert text.endswith("agl_y 2\n")


async def test_queue_length_follows_the_feed():
    store = MemoryStore()
    await store.enqueue([Rollout(rollout_id=new_rollout_id(), task=n) for n in range(3)])
    queue = QueueLength(store)
    feed = Feed(store=store, on_changes=(queue.on_changes,), on_gap=lambda: None)
    cursor = await store.cursor()
    await queue.load()
    following = asyncio.create_task(feed.follow(cursor))
    assert 3 == len(queue)
    (claim,) = await store.claim(worker="w")
    await store.enqueue([Rollout(rollout_id=new_rollout_id(), task=9) for _ in range(2)])
    await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="succeeded")])
    await eventually(lambda: 4 == len(queue))
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await store.close()


class FeedStore(MemoryStore):
    """A store whose change feed fails with ``error``, if set, or waits for ``answers``."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.answers = asyncio.Event()

    async def changes(self, *, after: int = 0, limit: int = 1000, wait_s: float = 0.0):
        if self.error is not None:
            raise self.error
        await self.answers.wait()
        return await super().changes(after=after, limit=limit, wait_s=min(wait_s, 0.01))


@asynccontextmanager
async def followed(store: FeedStore) -> AsyncIterator[tuple[Feed, list[Change], list[str]]]:
    """Follow a store's feed; the lists get its changes, and the failure at each gap."""
    changes, gaps = list[Change](), list[str]()
    feed = Feed(store=store, on_changes=(changes.extend,), on_gap=lambda: gaps.append(feed.failure))
    following = asyncio.create_task(feed.follow(await store.cursor()))
    await store.enqueue([Rollout(rollout_id=new_rollout_id(), task=1)])
    yield feed, changes, gaps
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await store.close()


@pytest.mark.parametrize(("error", "has_traceback"), [(StoreError("row 17"), False), (RuntimeError("row 17"), True)])
async def test_feed_that_cannot_be_read_is_read_again_and_a_store_that_answers_is_not_away(
    error: Exception, has_traceback: bool, monkeypatch, caplog
):
    monkeypatch.setattr(feeds, "_AFTER_FAILURE_S", 0.01)
    store = FeedStore()
    store.error = error
    store.answers.set()
    async with followed(store) as (_, changes, gaps):
        await eventually(lambda: 3 < len(gaps))
        assert {""} == set(gaps)
        store.error = None
        await eventually(lambda: 1 == len(changes))
    assert (1, has_traceback) == (caplog.text.count("trying again: row 17"), "Traceback" in caplog.text)


async def test_late_read_of_the_feed_counts_as_a_failure_until_it_ends_and_is_not_begun_again(monkeypatch):
    monkeypatch.setattr(feeds, "_WAIT_S", 0.01)
    monkeypatch.setattr(feeds, "_PATIENCE_S", 0.01)
    store = FeedStore()
    async with followed(store) as (feed, changes, gaps):
        await eventually(lambda: "no answer within 0.02 s" == feed.failure)
        store.answers.set()
        await eventually(lambda: 1 == len(changes))
        assert ("", []) == (feed.failure, gaps)


async def test_gate_holds_again_when_it_is_paused_before_the_held_wake():
    gate = CallGate(model_version="1")
    await gate.pause(drain_s=0)
    call = gate.passed()
    held = asyncio.create_task(call.__aenter__())
    await asyncio.sleep(0)
    gate.resume(model_version="2")
    await gate.pause(drain_s=0)
    for _ in range(5):
        await asyncio.sleep(0)  # what wakes, wakes now
    assert not held.done()
    assert 1 == gate.held
    gate.resume(model_version="3")
    assert "3" == await held
    assert not await gate.pause(drain_s=0)
    await call.__aexit__(None, None, None)
    assert await gate.pause(drain_s=0.1)


async def test_request_ids_are_shared_by_retries_of_one_attempt_only(serving):
    async with serving() as it:
        of = it.relay.owners.facts.request_id
        first, _ = await of("a.1", {}, b"body")
        assert (first, 1) == await of("a.1", {"x-stainless-retry-count": "1"}, b"body")
        assert first != (await of("b.1", {"x-stainless-retry-count": "1"}, b"body"))[0]
        assert first != (await of("a.1", {}, b"body"))[0]
        given = {"x-agl-request-id": "given", "x-stainless-retry-count": "2"}
        assert ("given", 2) == await of("a.1", given, b"body")
        assert 0 == (await of("a.1", {"x-stainless-retry-count": "-1"}, b"x"))[1]


@pytest.mark.parametrize(
    "header",
    ["", "00-x", f"00-{'0' * 32}-{'1' * 16}-01", f"00-{'a' * 32}-{'g' * 16}-01", f"00-{'a' * 31}-{'1' * 16}-01"],
)
def test_traceparent_that_is_not_valid_is_ignored(header):
    assert ("", "") == trace_of({"traceparent": header})


def test_span_id_header_is_checked():
    assert "0123456789abcdef" == span_id_of({"x-agl-span-id": "0123456789ABCDEF"})
    assert "" == span_id_of({"x-agl-span-id": "0123"})
