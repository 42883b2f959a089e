"""Where a store under test lives: what a test and its child processes need to open it."""

import importlib

from agl.contracts import Store
from agl.schemas import Record


class StoreLocation(Record, frozen=True, kw_only=True):
    """A factory by import path and the URL it gets; a second process needs no more to open the same store.

    Attributes:
        factory: ``"module:attribute"``, as in the plugin's record.
        url: Where; a fresh, empty place for every test.
    """

    factory: str
    url: str

    def open(self) -> Store:
        """A store object on this location."""
        module, _, attribute = self.factory.partition(":")
        return getattr(importlib.import_module(module), attribute)(self.url)


class Acknowledged(Record, frozen=True, kw_only=True):
    """One line of a child's report: a write that the store has acknowledged.

    Attributes:
        kind: ``enqueued``, ``claimed``, ``appended``, ``finished`` or ``trained``.
        key: The rollout's id.
    """

    kind: str
    key: str
