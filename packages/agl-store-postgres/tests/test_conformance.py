"""The PostgreSQL store passes the conformance class of stores."""

from collections.abc import Callable

import pytest

from agl_testing.conformance import StoreLocation

from .conftest import PostgresConformance


class TestPostgresStore(PostgresConformance):
    @pytest.fixture
    def locate(self, url: str) -> Callable[[str], StoreLocation]:
        return lambda name: StoreLocation(factory="agl_store_postgres.store:PostgresStore", url=f"{url}_{name}")
