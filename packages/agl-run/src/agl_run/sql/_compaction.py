"""Stores that can return the space of removed rollouts."""

from typing import Protocol, runtime_checkable

from agl.schemas import Record


class Compaction(Record, frozen=True, kw_only=True):
    """The sizes of a store before and after its compaction, in bytes."""

    before: int
    after: int


@runtime_checkable
class Compactable(Protocol):
    """A store with files of its own, or with tables that keep the space of removed rows."""

    async def compact(self) -> Compaction:
        """Return unused space to the system, unless there is little; other users of the store may have to wait."""
        ...
