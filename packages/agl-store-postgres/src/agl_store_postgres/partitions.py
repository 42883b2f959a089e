"""Partitions the table of spans by time, so that retention drops tables instead of deleting rows.

A rollout's number tells the period in which the rollout was made: the upper bits count periods, and the lower bits
count the rollouts of a period. The key of an attempt begins with that number, so it determines the partition of the
attempt's spans, and the keys of the table stay the same. The first rollout of a new hour, day, week or month advances
the sequence of numbers to the next period. The partition of a period is made with its first span, on the server that
gets that span.

Planning a query over many partitions takes longer than the query. So statements on spans contain the bounds of the
partitions that they need as constants, see :func:`bounds` and :class:`Aim`.
"""

from collections.abc import Iterable

from agl_store_postgres.connections import Connection
from agl_store_sqlite.sql.rows import ATTEMPT_BITS

PERIOD_BITS = 32
"""Bits of a rollout's number within its period."""

KEY_BITS = PERIOD_BITS + ATTEMPT_BITS
SEQUENCE = "pg_get_serial_sequence('rollouts', 'seq')::regclass"
PERIOD = f"(coalesce(pg_sequence_last_value({SEQUENCE}), 0) >> {PERIOD_BITS})"
_CURRENT = f"SELECT ({PERIOD})::int".encode()
_PARTITIONS = (
    b"SELECT substring(c.relname FROM '^spans_(\\d+)$')::int FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
    b"WHERE i.inhparent = 'spans'::regclass ORDER BY 1"
)
_HOLD = b"SELECT pg_try_advisory_xact_lock('partitioning'::regclass::oid::int, %s::int)"
_IS_NEEDED = "SELECT EXISTS (SELECT FROM rollouts WHERE {of_shard}seq >= %s AND seq < %s)"
_FORGET = b"DELETE FROM removals WHERE shard = %s AND seq >= %s AND seq < %s"
_DROP_ONE = b"SELECT agl_drop_partition(%s::int)"
_MAKE_ONE = b"SELECT agl_make_partition(%s::int)"


class Aim:
    """A guess of the period that the next statement on spans needs: the period of the last statement.

    The guess is nearly always right, because rollouts that run at the same time were made at the same time. A statement
    with a wrong guess is sent again.
    """

    def __init__(self) -> None:
        self.period = 0


class Partitions:
    """The partitions that a connection knows to exist, and its guess of the period that its next statement needs."""

    def __init__(self) -> None:
        self.aim = Aim()
        self._made: set[int] = set()

    def make(self, db: Connection, keys: Iterable[int]) -> None:
        """Make missing partitions for the spans of attempts, given by their keys, in the open transaction."""
        for period in sorted({period_of(key) for key in keys} - self._made):
            db.execute(_MAKE_ONE, (period,))
            self._made.add(period)

    def forget(self) -> None:
        """Forget which partitions exist, because some were dropped or the transaction that made them was undone."""
        self._made.clear()


def period_of(key: int) -> int:
    """Return the period of an attempt, by its key."""
    return max(0, key >> KEY_BITS)


def bounds(first: int, last: int | None = None) -> bytes:
    """Return conditions on ``s.attempt`` by which the planner sees the partitions of these periods alone."""
    lower = f" AND s.attempt >= {first << KEY_BITS}" if first else ""
    upper = f" AND s.attempt < {(last + 1) << KEY_BITS}" if last is not None else ""
    return (lower + upper).encode()


def bounds_of(keys: Iterable[int]) -> bytes:
    """Return the conditions on ``s.attempt`` that cover the attempts with these keys."""
    periods = {period_of(key) for key in keys}
    return bounds(min(periods), max(periods))


def drop_unneeded(control: Connection, server: Connection, *, shard: int = 0) -> bool:
    """Drop the partitions of earlier periods that no rollout needs; returns false if one of them was in use.

    A partition is needed as long as any rollout of its period exists, whatever the rollout's state, and as long as an
    open transaction may add such a rollout.

    Args:
        control: A connection to the server with the rollouts.
        server: A connection to the server with the spans; the same connection in a store without shards.
        shard: The number of the server with the spans; 0 in a store without shards.
    """
    ((current,),) = control.execute(_CURRENT).fetchall()
    is_done = True
    for (period,) in server.execute(_PARTITIONS).fetchall():
        if period < current:
            with control.transaction():
                is_done &= _drop(control, server, period, shard)
    return is_done


def _drop(control: Connection, server: Connection, period: int, shard: int) -> bool:
    where = (period << PERIOD_BITS, (period + 1) << PERIOD_BITS)
    if control.execute(_HOLD, (period,)).fetchone() != (True,):
        return False
    needed = _IS_NEEDED.format(of_shard=f"shard = {shard} AND " if shard else "").encode()
    if control.execute(needed, where).fetchone() == (True,):
        return True
    if server.execute(_DROP_ONE, (period,)).fetchone() != (True,):
        return False
    control.execute(_FORGET, (shard, *where))
    return True
