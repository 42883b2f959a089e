"""Opens a store for the test methods of the store's conformance classes."""

import functools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from agl.contracts import Store
from agl_testing.conformance._base import run
from agl_testing.stores.process import StoreLocation


@asynccontextmanager
async def opened(location: StoreLocation) -> AsyncGenerator[Store]:
    """Open the store at a location, and close it at the end of the context."""
    store = location.open()
    try:
        yield store
    finally:
        await store.close()


def store_test(test: Callable[[Any, Store], Awaitable[None]]) -> Callable[[Any, StoreLocation], None]:
    """Turn a coroutine function that takes an open store into a test method, which opens and closes the store."""

    async def body(case: Any, location: StoreLocation) -> None:
        async with opened(location) as store:
            await test(case, store)

    @functools.wraps(test)
    def method(self: Any, location: StoreLocation) -> None:
        run(body(self, location))

    del method.__wrapped__  # pytest would read the coroutine's arguments as fixtures
    return method
