"""The memory store runs the conformance class that other stores run."""

from collections.abc import Callable

import pytest

from agl_testing.conformance import StoreConformance, StoreLocation


class TestMemoryStore(StoreConformance):
    is_durable = False
    is_shared = False
    has_schema_version = False
    has_older_schema = False
    can_be_damaged = False

    @pytest.fixture
    def locate(self) -> Callable[[str], StoreLocation]:
        return lambda _: StoreLocation(factory="agl.stores:MemoryStore", url="memory://")
