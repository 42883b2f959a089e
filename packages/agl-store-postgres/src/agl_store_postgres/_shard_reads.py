"""Answers reads of a store in shards: spans come from the shard that the rollout's row names."""

import threading
from collections.abc import Callable

import psycopg

from agl.errors import NotFoundError, StoreError
from agl.schemas import Span, rollout_id_of
from agl.stores import MAX_SEQUENCE, unknown_attempt
from agl_store_postgres._reads import ATTEMPT_KEY, PostgresReads
from agl_store_postgres.connections import Connection
from agl_store_postgres.faults import explain
from agl_store_postgres.partitions import bounds_of
from agl_store_postgres.placing import Placing, UnnamedShardError
from agl_store_postgres.shard_connections import LostShardError, ShardConnections
from agl_store_sqlite.sql.packing import Unpacker
from agl_store_sqlite.sql.rows import NUMBER_MASK, Row, number_of

SHARD_WAIT_S = 20.0
"""Seconds for which a read waits for a shard; less than a transaction on the control server may be idle."""

_PLACE = (
    "SELECT k.key, k.shard, EXISTS (SELECT 1 FROM attempts a WHERE a.id = k.key), "
    "coalesce((SELECT m.last FROM span_marks m WHERE m.attempt = k.key), 0) "
    f"FROM (SELECT {ATTEMPT_KEY} AS key, r.shard FROM rollouts r WHERE r.rollout_id = %s) AS k"
).encode()
_PAGE = (
    b"SELECT s.sequence, s.data FROM spans s WHERE s.attempt = %s AND s.sequence > %s AND s.sequence <= %s%b "
    b"ORDER BY s.sequence LIMIT %s"
)
_ONE = b"SELECT s.data FROM spans s WHERE s.attempt = %s AND s.sequence = %s"


class MissingSpansError(StoreError):
    """Raised when a shard lacks spans that were acknowledged; the rollout may be gone by now."""


class ThreadShards:
    """Gives each thread its own connections to the shards."""

    def __init__(self, placing: Placing, *, stopping: threading.Event) -> None:
        self.placing = placing
        self._stopping = stopping
        self._local = threading.local()
        self._made: list[ShardConnections] = []

    @property
    def own(self) -> ShardConnections:
        """The connections of the calling thread."""
        found: ShardConnections | None = getattr(self._local, "own", None)
        if found is None:
            found = self._local.own = ShardConnections(self.placing, stopping=self._stopping)
            self._made.append(found)
        return found

    def reads(self, db: Connection) -> "ShardedReads":
        """Return the reads for one transaction on the control server."""
        return ShardedReads(db, self)

    def close(self) -> None:
        """Close all connections."""
        while self._made:
            self._made.pop().close()


class ShardedReads(PostgresReads):
    """Implements :class:`agl.stores.Reads` for one transaction on the control server, with spans from the shards."""

    def __init__(self, db: Connection, shards: ThreadShards) -> None:
        super().__init__(db)
        self._shards = shards

    def spans(
        self, rollout_id: str, *, attempt_id: str | None = None, after: int = 0, limit: int = 10_000
    ) -> list[Span]:
        number = None if attempt_id is None else number_of(attempt_id) if attempt_id else 0
        row = self._db.execute(_PLACE, (number, rollout_id), binary=True).fetchone()
        if row is None:
            raise NotFoundError("rollout", rollout_id)
        key, shard, is_known, last = row
        if attempt_id and (not is_known or rollout_id_of(attempt_id) != rollout_id):
            raise unknown_attempt(rollout_id, attempt_id)
        if last <= after or not limit:
            return []
        after = min(after, MAX_SEQUENCE)
        query = _PAGE.replace(b"%b", self._bounds_of(key))
        page = self._on(shard, lambda db: db.execute(query, (key, after, last, limit), binary=True).fetchall())
        if len(page) < limit and (not page or page[-1][0] != last):
            raise self._missing(shard, rollout_id, last)

        def fetch(sequence: int) -> bytes:
            return self._one(shard, key, sequence, rollout_id)

        unpacker = Unpacker(fetch, rollout_id=rollout_id, number=key & NUMBER_MASK)
        return [unpacker.unpack(data, sequence=sequence) for sequence, data in page]

    def _one(self, shard: int, key: int, sequence: int, rollout_id: str) -> bytes:
        query = _ONE + self._bounds_of(key)
        found = self._on(shard, lambda db: db.execute(query, (key, sequence), binary=True).fetchall())
        if not found:
            raise self._missing(shard, rollout_id, sequence)
        return found[0][0]

    def _bounds_of(self, key: int) -> bytes:
        return bounds_of([key]) if self._shards.placing.is_partitioned else b""

    def _on(self, number: int, look: Callable[[Connection], list[Row]]) -> list[Row]:
        """Run ``look`` on a shard; if the connection breaks, run it once more on a new connection."""
        try:
            for is_last in (False, True):
                self._shards.own.open(number, limit_s=SHARD_WAIT_S)
                try:
                    with self._shards.own.guarding(number) as db:
                        return look(db)
                except LostShardError as lost:
                    if is_last:
                        shown = self._shards.placing.shard(number).target.shown
                        raise StoreError(f"the connection to {shown} broke twice; ask again") from lost
        except UnnamedShardError:
            raise unnamed(self._address(number), number) from None
        except psycopg.Error as error:
            raise explain(error, self._shards.placing.shard(number).target.shown) from error
        raise AssertionError("the second try returns or raises")

    def _address(self, number: int) -> str:
        row = self._db.execute(b"SELECT address FROM shards WHERE id = %s", (number,)).fetchone()
        return str(row[0]) if row else "an unknown address"

    def _missing(self, number: int, rollout_id: str, sequence: int) -> MissingSpansError:
        return MissingSpansError(
            f"{self._shards.placing.shard(number).target.shown} lacks spans of rollout {rollout_id!r}, up to sequence "
            f"{sequence}, that the store acknowledged: it was restored from a backup older than the control server's; "
            "restore a newer one, or delete the rollout"
        )


def unnamed(address: str, number: int) -> StoreError:
    """Return the error for a rollout on a shard that the store's URL does not name."""
    return StoreError(
        f"that rollout's spans are on shard {number}, last at {address}, which this process's store URL does not name; "
        "add it to shards= and start again"
    )
