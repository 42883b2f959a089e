"""The location of a store under test, with which a test and its child processes open it."""

import importlib

from agl.contracts import Store
from agl.schemas import Record


class StoreLocation(Record, frozen=True, kw_only=True):
    """A store's factory by import path, and its URL; enough for a second process to open the same store.

    Attributes:
        factory: ``"module:attribute"``, as in the plugin's record.
        url: URL of the store; fresh and empty for every test.
    """

    factory: str
    url: str

    def open(self) -> Store:
        """Open a store object on this location."""
        module, _, attribute = self.factory.partition(":")
        return getattr(importlib.import_module(module), attribute)(self.url)


class Acknowledged(Record, frozen=True, kw_only=True):
    """One line of a child's report: a write that the store acknowledged.

    Attributes:
        kind: ``enqueued``, ``claimed``, ``appended``, ``finished`` or ``trained``.
        key: The rollout's id.
    """

    kind: str
    key: str
