"""Runs writes of a store in shards: spans are committed on their shards first, then everything else on control.

No transaction spans two servers. The transaction on the control server locks the rows of the rollouts and is committed
last. Its commit acknowledges the sequences of the new spans; until then nobody sees these spans on the shards.

An earlier transaction that was not completed may have left spans on a shard. They are removed while the rollouts are
locked: exactly the rows that were found, and only after the control server has confirmed that it still holds the locks.
So a machine that was frozen meanwhile removes nothing that another machine has written since.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from psycopg.pq import TransactionStatus

from agl.errors import StoreError
from agl.stores import Work
from agl_store_postgres.connections import Connection
from agl_store_postgres.loading import BEGIN, Begun, begin
from agl_store_postgres.partitions import Partitions, bounds_of
from agl_store_postgres.placing import Placing
from agl_store_postgres.shard_connections import LostShardError, ShardConnections
from agl_store_postgres.urls import DatabaseTarget
from agl_store_postgres.writer import BatchWriter
from agl_store_postgres.writing import add_spans, commit
from agl_store_sqlite.sql.changes import Changes, LoadedRows
from agl_store_sqlite.sql.needs import Needs
from agl_store_sqlite.sql.rows import ATTEMPT_BITS, number_of
from agl_store_sqlite.sql.servers import RESTART_WAIT_S

_FOUND = (
    b"WITH w AS (SELECT * FROM unnest(%s::bigint[], %s::int[]) AS w(attempt, last)), "
    b"beyond AS (SELECT s.attempt, s.sequence FROM w JOIN spans s ON s.attempt = w.attempt AND s.sequence > w.last "
    b"FOR UPDATE OF s) SELECT attempt, sequence, NULL::text FROM beyond UNION ALL "
    b"SELECT s.attempt, s.sequence, s.span_id FROM unnest(%s::bigint[], %s::int[], %s::text[]) "
    b"AS w(attempt, last, span_id) "
    b"JOIN spans s ON s.attempt = w.attempt AND s.span_id = w.span_id AND s.sequence <= w.last"
)
"""Finds spans beyond the last acknowledged sequence, without their ids, and the given spans that are stored already."""
_REMOVE_LEFT = (
    b"DELETE FROM spans s USING unnest(%s::bigint[], %s::int[]) AS w(attempt, sequence) "
    b"WHERE s.attempt = w.attempt AND s.sequence = w.sequence"
)


class AwayShardError(Exception):
    """The answer to work on a shard that does not answer; the work is then passed to that shard's own thread."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class ShardWriter(BatchWriter):
    """Runs batches of work over the control server and the shards; used by one thread.

    Args:
        waits: Whether the writer waits for shards that do not answer. If not, work that needs such a shard is answered
            with :class:`AwayShardError`, and other work goes on.
    """

    def __init__(
        self,
        target: DatabaseTarget,
        *,
        placing: Placing,
        connection: Connection | None,
        feed: int,
        stopping: threading.Event,
        on_change: Callable[[], object],
        waits: bool,
        is_partitioned: bool,
    ) -> None:
        super().__init__(
            target,
            connection=connection,
            feed=feed,
            stopping=stopping,
            on_change=on_change,
            is_partitioned=is_partitioned,
        )
        self._of_shards = {number: Partitions() for number in placing.shards} if is_partitioned else {}
        self._placing = placing
        self._waits = waits
        self._shards = ShardConnections(placing, stopping=stopping)

    def close(self) -> None:
        """See :meth:`BatchWriter.close`."""
        super().close()
        self._shards.close()

    def __call__(self, works: Sequence[Work[Any]]) -> Sequence[Any]:
        """Return the answers after all commits; see :meth:`BatchWriter.__call__`."""
        end = time.monotonic() + RESTART_WAIT_S
        while True:
            needed = [self._placing.of(work) for work in works]
            away = self._away(set[int]().union(*needed))
            ready = [work for work, shards in zip(works, needed, strict=True) if not shards & away]
            try:
                done = iter(super().__call__(ready) if ready else ())
            except LostShardError as lost:
                if time.monotonic() > end:
                    shard = self._placing.shard(lost.number)
                    raise StoreError(f"the connection to {shard.target.shown} breaks again and again") from lost
                continue
            finally:
                self._shards.rollback()
            return [AwayShardError(min(shards & away)) if shards & away else next(done) for shards in needed]

    def _away(self, needed: set[int]) -> set[int]:
        """Connect to shards; return those that do not answer, unless this writer waits for them."""
        found: set[int] = set()
        for number in needed:
            if self._shards.is_open(number) and (self._waits or number not in self._placing.away):
                continue
            if self._waits:
                self._shards.open(number, limit_s=RESTART_WAIT_S)
                self._placing.away.discard(number)
            elif number in self._placing.away or not self._answers(number):
                found.add(number)
        return found

    def _answers(self, number: int) -> bool:
        try:
            self._shards.open(number, limit_s=0.0)
        except StoreError:
            self._placing.away.add(number)
            return False
        return True

    def _begin(self, db: Connection, needs: Sequence[Needs]) -> Begun:
        self._shards.rollback()
        begun = begin(db, needs, shards=list(self._placing.shards), partitions=self._partitions)
        for number, spans in self._by_shard(begun, needs).items():
            if not self._shards.is_open(number) and not self._answers(number):
                raise LostShardError(number)
            self._load(db, begun.rows, number, spans)
        return begun

    def _by_shard(self, begun: Begun, needs: Sequence[Needs]) -> dict[int, list[tuple[int, str]]]:
        """Return the spans to append, as the attempt's number and the span's id, by the shard that they belong to."""
        found: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
        places: dict[tuple[str, str], tuple[int, int] | None] = {}
        for span in (span for need in needs for span in need.spans):
            where = span.rollout_id, span.attempt_id
            if where not in places:
                places[where] = self._place(begun, *where)
            if (place := places[where]) is not None:
                found[place[0]].append((place[1], span.span_id))
        return found

    def _place(self, begun: Begun, rollout_id: str, attempt_id: str) -> tuple[int, int] | None:
        """Return the shard and the number of an attempt; ``None`` for an unknown rollout."""
        seq = begun.rows.seqs.get(rollout_id)
        if seq is None:
            return None
        key = seq << ATTEMPT_BITS | (number_of(attempt_id) if attempt_id else 0)
        self._placing.learn(rollout_id, begun.shards[key])
        return begun.shards[key], key

    def _load(self, db: Connection, rows: LoadedRows, number: int, spans: Sequence[tuple[int, str]]) -> None:
        """Begin a transaction on a shard, read which of the spans it has, and remove spans of incomplete writes."""
        keys = list(dict.fromkeys(key for key, _ in spans))
        last = [rows.last[key] for key, _ in spans]
        asked = (keys, [rows.last[key] for key in keys], [key for key, _ in spans], last, [each for _, each in spans])
        with self._shards.guarding(number) as shard:
            within = bounds_of(keys) if self._of_shards else b""
            query = _FOUND.replace(b" AND s.sequence", within + b" AND s.sequence")
            with shard.pipeline():
                shard.execute(BEGIN)
                cursor = shard.execute(query, asked, binary=True)
            found = cursor.fetchall()  # after the pipeline, whose end waits for the server anyway
            rows.kept |= {(key, span_id) for key, _, span_id in found if span_id is not None}
            if left := [(key, sequence) for key, sequence, span_id in found if span_id is None]:
                db.execute("SELECT 1")  # fails unless this transaction still holds the rollouts
                shard.execute(_REMOVE_LEFT + within, ([key for key, _ in left], [sequence for _, sequence in left]))

    def _forget(self) -> None:
        for partitions in self._of_shards.values():
            partitions.forget()

    def _before_commit(self, db: Connection, begun: Begun, changes: Changes) -> None:
        if not changes.spans:
            return
        new = {seq: self._placing.place(rollout.rollout_id) for seq, rollout in changes.added}
        rows: defaultdict[int, list[tuple[int, int, str, bytes]]] = defaultdict(list)
        for row in changes.spans:
            rows[begun.shards[row[0]] if row[0] in begun.shards else new[row[0] >> ATTEMPT_BITS]].append(row)
        for number, own in rows.items():
            with self._shards.guarding(number) as shard:
                if fresh := list({row[0] for row in own} - begun.shards.keys()):
                    if shard.info.transaction_status == TransactionStatus.IDLE:
                        shard.execute(BEGIN)
                    shard.execute("DELETE FROM spans WHERE attempt = ANY(%s::bigint[])", (fresh,))
                add_spans(shard, own, self._of_shards.get(number))
                shard.execute("COMMIT")

    def _commit(self, db: Connection, changes: Changes) -> None:
        commit(db, changes, feed=self._feed, place=self._placing.place)
