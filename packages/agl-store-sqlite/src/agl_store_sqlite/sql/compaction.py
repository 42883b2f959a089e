"""Protocols of stores that can measure their data and free the space of removed rollouts."""

from typing import Protocol, runtime_checkable

from agl.schemas import Record


class Compaction(Record, frozen=True, kw_only=True):
    """The sizes of a store before and after its compaction, in bytes."""

    before: int
    after: int


@runtime_checkable
class Compactable(Protocol):
    """A store that can return the space of removed rows to the system."""

    async def compact(self) -> Compaction:
        """Return unused space to the system, unless there is little; other users of the store may have to wait."""
        ...


@runtime_checkable
class Measured(Compactable, Protocol):
    """A store that knows how much space its data take."""

    async def size(self) -> int:
        """Return the bytes of the data, without the space that is free for new ones."""
        ...

    async def vacuum(self) -> Compaction:
        """Return all unused space to the file system; every other user of the store has to wait meanwhile."""
        ...
