"""How a test method of the store's classes gets its store."""

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from agl.contracts import Store
from agl_testing.conformance._base import run
from agl_testing.stores.location import StoreLocation


def store_test(test: Callable[[Any, Store], Awaitable[None]]) -> Callable[[Any, StoreLocation], None]:
    """Make a test method out of a coroutine that gets an open store; the store is closed after it."""

    async def body(case: Any, location: StoreLocation) -> None:
        store = location.open()
        try:
            await test(case, store)
        finally:
            await store.close()

    @functools.wraps(test)
    def method(self: Any, location: StoreLocation) -> None:
        run(body(self, location))

    del method.__wrapped__  # pytest would read the coroutine's arguments as fixtures
    return method
