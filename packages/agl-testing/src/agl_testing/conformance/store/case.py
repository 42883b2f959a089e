"""Opens a store for the test methods of the store's conformance classes."""

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from agl.contracts import Store
from agl_testing.conformance._base import run
from agl_testing.stores.process import StoreLocation


def store_test(test: Callable[[Any, Store], Awaitable[None]]) -> Callable[[Any, StoreLocation], None]:
    """Turn a coroutine function that takes an open store into a test method, which opens and closes the store."""

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
