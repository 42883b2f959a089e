"""Where a store under test lives, and how every test opens it."""

import functools
import importlib
from collections.abc import Awaitable, Callable
from typing import Any

from agl.contracts import Store
from agl.schemas import Record
from agl_testing.conformance._base import run


class StoreLocation(Record, frozen=True, kw_only=True):
    """A factory by import path and the URL it gets; a second process needs no more to open the same store.

    Attributes:
        factory: ``"module:attribute"``, as in the plugin's record.
        url: A fresh, empty location for every test.
    """

    factory: str
    url: str

    def open(self) -> Store:
        """A store object on this location."""
        module, _, attribute = self.factory.partition(":")
        return getattr(importlib.import_module(module), attribute)(self.url)


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
