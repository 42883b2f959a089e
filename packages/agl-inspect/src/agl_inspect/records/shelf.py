"""A shelf saves records of one type in the store's state, under keys with a common prefix."""

from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec

from agl.contracts import Store

T = TypeVar("T")


def run_key(name: str, run: int, what: str) -> str:
    """Return the key of a part of a run in the store's state, such as ``experiment/NAME/RUN/alerts/``."""
    return f"experiment/{name}/{run}/{what}"


class Shelf(Generic[T]):
    """Adds and reads records below a prefix, such as the alerts of a run below ``experiment/NAME/RUN/alerts/``.

    Args:
        kind: The type of the records.
        prefix: The prefix of the records' keys. A record named ``""`` has the prefix as its whole key, which suits a
            shelf of a single record.
    """

    def __init__(self, kind: type[T], prefix: str) -> None:
        self._kind, self._prefix = kind, prefix

    def states(self, records: Mapping[str, T]) -> dict[str, bytes]:
        """Encode records by name as states by key, to be saved in one transaction with other states."""
        return {self._prefix + name: msgspec.json.encode(record) for name, record in records.items()}

    async def add(self, store: Store, records: Mapping[str, T]) -> None:
        """Save records by name; each replaces an earlier record of the same name."""
        if records:
            await store.save_state(self.states(records))

    async def read(self, store: Store) -> dict[str, T]:
        """Return all records by name, in order of their names."""
        found = await store.load_state(self._prefix)
        return {
            key.removeprefix(self._prefix): msgspec.json.decode(data, type=self._kind)
            for key, data in sorted(found.items())
        }

    async def get(self, store: Store, name: str = "") -> T | None:
        """Return the record with this name; ``None`` for an unknown name."""
        key = self._prefix + name
        data = (await store.load_state(key)).get(key)
        return None if data is None else msgspec.json.decode(data, type=self._kind)
