"""The remote store is a store: the conformance suite through a real server."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agl.tracing import AttemptTokens
from agl_gateway.embedded import EmbeddedGateway
from agl_run import SQLiteStore
from agl_testing.conformance.store import StoreConformance, StoreLocation

SECRET = b"a secret of the remote store tests"


class TestHttpStore(StoreConformance):
    has_schema_version = False  # the served store's own; this one stands for no data

    @pytest.fixture
    def location(self, tmp_path: Path) -> Iterator[StoreLocation]:
        store = SQLiteStore(f"sqlite:///{tmp_path}/served.db")
        gateway = EmbeddedGateway()
        url = asyncio.run(gateway.start(store=store, upstreams=[], secret=SECRET))
        token = AttemptTokens(SECRET).issue("", "", scope="admin", expires_at=time.time() + 600)
        yield StoreLocation(factory="agl_gateway.client:HttpStore", url=url.replace("://", f"://:{token}@"))
        asyncio.run(gateway.stop())
        asyncio.run(store.close())
