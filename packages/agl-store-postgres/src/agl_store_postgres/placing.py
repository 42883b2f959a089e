"""Chooses the shard of each rollout. All spans of a rollout are on one shard, which never changes.

The shard of a new rollout follows from its id and the shards' identities by rendezvous hashing. So processes agree even
if the URLs list the shards in different orders, and an added shard takes an equal share of new rollouts from each of
the others. The rollout's row on the control server names the shard.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from agl.schemas import Span
from agl.stores import Work
from agl_store_postgres.urls import DatabaseTarget

_MOST_KNOWN = 10_000
"""Largest number of rollouts whose shard is remembered because it does not follow from the rollout's id."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A shard of the store.

    Attributes:
        number: The shard's number on the control server, which the rows of its rollouts have.
        identity: A random id, made with the shard's tables; it stays the same if the server's address changes.
        store: The identity of the control server's store.
        target: The shard's database.
    """

    number: int
    identity: str
    store: str
    target: DatabaseTarget


class UnnamedShardError(Exception):
    """Raised for a rollout on a shard that the store's URL does not name."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(kw_only=True)
class Placing:
    """The shards of an open store, and the shard of each rollout; used by several threads.

    Attributes:
        shards: The shards, by number.
        away: Numbers of shards that did not answer; until they answer again, each has a separate thread.
        is_partitioned: Whether the shards' tables have partitions.
    """

    shards: Mapping[int, Shard]
    away: set[int] = field(default_factory=set[int])
    is_partitioned: bool = False
    _elsewhere: dict[str, int] = field(default_factory=dict[str, int])

    def shard(self, number: int) -> Shard:
        """Return a shard by its number; raises :class:`UnnamedShardError`."""
        if number not in self.shards:
            raise UnnamedShardError(number)
        return self.shards[number]

    def place(self, rollout_id: str) -> int:
        """Return the number of the shard that a new rollout gets."""
        key = rollout_id.encode()
        return max(self.shards.values(), key=lambda shard: _weight(shard.identity, key)).number

    def expected(self, rollout_id: str) -> int:
        """Return the number of a rollout's shard; a guess if the rollout may be older than the list of shards."""
        return self._elsewhere.get(rollout_id) or self.place(rollout_id)

    def learn(self, rollout_id: str, number: int) -> None:
        """Remember the shard of a rollout, if it differs from the expected shard."""
        if self.expected(rollout_id) != number:
            if len(self._elsewhere) >= _MOST_KNOWN:
                self._elsewhere.clear()
            self._elsewhere[rollout_id] = number

    def of(self, work: Work[Any]) -> set[int]:
        """Return the numbers of the shards that an operation is expected to need."""
        return {self.expected(rollout_id) for rollout_id in {span.rollout_id for span in spans_of(work)}}


def spans_of(work: Work[Any]) -> Iterable[Span]:
    """Return the spans that an operation writes."""
    match work.act.__name__:
        case "append_spans":
            return work.args[0]
        case "finish" | "restore":
            return [span for each in work.args[0] for span in each.spans]
        case _:
            return ()


def _weight(identity: str, key: bytes) -> bytes:
    return blake2b(key, key=identity.encode(), digest_size=8).digest()
