"""In a Cluster a whole store is in one slot, and the store finds the node that has that slot."""

import asyncio
from collections.abc import Iterator

import pytest
from redis import crc

from agl.contracts import RolloutQuery
from agl_store_redis.store import RedisStore
from agl_testing.stores.samples import make_rollout, make_span, outcome_of
from agl_testing.waiting import wait_until

from .conftest import Server

SLOTS = 16384


@pytest.fixture
def nodes() -> Iterator[list[Server]]:
    """Start two nodes, the first of which has all slots."""
    nodes = [Server(cluster_enabled="yes"), Server(cluster_enabled="yes")]
    nodes[0].run("CLUSTER", "ADDSLOTSRANGE", 0, SLOTS - 1)
    nodes[1].run("CLUSTER", "MEET", "127.0.0.1", nodes[0].port, nodes[0].options["cluster-port"])
    wait_until(lambda: all(b"cluster_state:ok" in node.run("CLUSTER", "INFO") for node in nodes))
    wait_until(lambda: all(b"cluster_known_nodes:2" in node.run("CLUSTER", "INFO") for node in nodes))
    yield nodes
    for node in nodes:
        node.remove()


async def finish_one(store: RedisStore) -> None:
    await store.enqueue([make_rollout(experiment="e")])
    (claim,) = await store.claim(worker="w", wait_s=60)
    await store.finish([outcome_of(claim, spans=[make_span(claim)])])


async def test_store_is_found_from_any_node_and_again_after_its_slot_has_moved(nodes: list[Server]) -> None:
    store = RedisStore(nodes[1].url(prefix="p"))
    await finish_one(store)
    assert {b"{p}:"} == {key[:4] for key in nodes[0].run("KEYS", "*")}
    assert [] == nodes[1].run("KEYS", "*")
    waiting = asyncio.create_task(store.claim(worker="w", wait_s=120))
    await asyncio.to_thread(move, nodes, crc.key_slot(b"p"))
    await store.enqueue([make_rollout(experiment="e")])
    (claim,) = await waiting
    await store.finish([outcome_of(claim)])
    assert ["succeeded"] * 2 == [rollout.status for rollout in await store.rollouts(RolloutQuery())]
    assert [] == nodes[0].run("KEYS", "*")
    await store.close()


def move(nodes: list[Server], slot: int) -> None:
    """Move a slot and its keys from the first node to the second."""
    source, target = (node.run("CLUSTER", "MYID").decode() for node in nodes)
    nodes[1].run("CLUSTER", "SETSLOT", slot, "IMPORTING", source)
    nodes[0].run("CLUSTER", "SETSLOT", slot, "MIGRATING", target)
    while keys := nodes[0].run("CLUSTER", "GETKEYSINSLOT", slot, 100):
        nodes[0].run("MIGRATE", "127.0.0.1", nodes[1].port, "", 0, 5000, "KEYS", *keys)
    for node in reversed(nodes):
        node.run("CLUSTER", "SETSLOT", slot, "NODE", target)
