"""The HTTP store passes the conformance suite of stores, through a real server."""

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from agl.contracts import RolloutQuery
from agl.errors import ConfigError, NotFoundError
from agl.schemas import Rollout
from agl_gateway.client import HttpStore
from agl_gateway.embedded import EmbeddedGateway
from agl_run.access.tokens import AttemptTokens
from agl_store_sqlite._store import SQLiteStore
from agl_testing.conformance.store import StoreConformance, StoreLocation

SECRET = b"a secret of the remote store tests"


class TestHttpStore(StoreConformance):
    has_schema_version = False  # the served store's own; this one stands for no data
    can_be_damaged = False  # the same

    @pytest.fixture
    def locate(self, tmp_path: Path) -> Iterator[Callable[[str], StoreLocation]]:
        with ExitStack() as stack:
            yield lambda name: _served(stack, tmp_path / f"{name}.db")


def _served(stack: ExitStack, path: Path) -> StoreLocation:
    """Run a gateway on a new store until the stack is closed; returns where the store is."""
    store = SQLiteStore(f"sqlite:///{path}")
    gateway = EmbeddedGateway()
    url = asyncio.run(gateway.start(store=store, upstreams=[], secret=SECRET))
    stack.callback(lambda: asyncio.run(store.close()))
    stack.callback(lambda: asyncio.run(gateway.stop()))
    token = AttemptTokens(SECRET).issue("", "", scope="admin", expires_at=time.time() + 900)
    return StoreLocation(factory="agl_gateway.client:HttpStore", url=url.replace("://", f"://:{token}@"))


def test_damaged_rollout_is_named_and_removed_through_a_gateway(tmp_path: Path) -> None:
    async def body(location: StoreLocation) -> None:
        store = location.open()
        await store.enqueue([Rollout(rollout_id="a", task=1)])
        with closing(sqlite3.connect(tmp_path / "runs.db")) as database:
            database.execute("UPDATE rollouts SET data = x'c1'")
            database.commit()
        with pytest.raises(NotFoundError, match="the record of rollout 'a' cannot be read") as caught:
            await store.rollouts(RolloutQuery(ids=("a",)))
        assert caught.value.is_damaged
        assert 1 == await store.delete(["a"])
        await store.close()

    with ExitStack() as stack:
        asyncio.run(body(_served(stack, tmp_path / "runs.db")))


@pytest.mark.parametrize("url", ["http://[x", "http://", "ftp://host"])
def test_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not an http"):
        HttpStore(url, token="t")
