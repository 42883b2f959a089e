"""Removes spans of rollouts that are gone, in a thread of its own: from shards, and from partitions.

``removals`` names them, with the commit that removes the rollouts, so none is forgotten when a process or a server goes
away in between: the next one that opens the store, or compacts it, goes on. Whole partitions that no rollout needs any
more are dropped first; of the others, rows are deleted.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psycopg

from agl.errors import StoreError
from agl_store_postgres.connections import Connection, connect
from agl_store_postgres.maintenance import connected
from agl_store_postgres.partitions import drop_unneeded
from agl_store_postgres.placing import Placing
from agl_store_postgres.shard_connections import LostShardError, ShardConnections
from agl_store_postgres.urls import DatabaseTarget
from agl_store_postgres.writing import remove_spans
from agl_store_sqlite.sql.servers import START_WAIT_S

QUIET_S = 3.0
"""Seconds for which removals in a partitioned store pause before rows are deleted: the next one may end a partition."""

_PAGE = 1000

_WAITING = b"SELECT seq FROM removals WHERE shard = %s ORDER BY seq LIMIT %s"
_DONE = b"DELETE FROM removals WHERE seq = ANY(%s::bigint[])"

_logger = logging.getLogger(__name__)


class Sweeper:
    """Sweeps in one background thread, which lives while there is something to do.

    Args:
        sweep: Removes what is to be removed.
        shown: Names the store in warnings.
        quiet_s: Seconds without another :meth:`wake` that it waits for.
    """

    def __init__(self, sweep: Callable[[], object], *, shown: str, quiet_s: float = 0.0) -> None:
        self._sweep = sweep
        self._shown = shown
        self._quiet_s = quiet_s
        self._lock = threading.Lock()
        self._is_due = False
        self._is_new = False
        self._closing = threading.Event()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="agl-postgres-sweep")

    def wake(self) -> None:
        """Start removing unless that has been asked for already; returns at once."""
        with self._lock, suppress(RuntimeError):  # the store is closed, and the next one that opens goes on
            self._is_new = True
            if not self._is_due:
                self._executor.submit(self._run)
                self._is_due = True

    def close(self) -> None:
        """Finish what was asked for. Blocks; a server that does not answer is left to the next store object."""
        self._closing.set()
        self._executor.shutdown(wait=True)

    def _run(self) -> None:
        while self._take_news() and not self._closing.wait(self._quiet_s):
            pass
        with self._lock:
            self._is_due = False
        try:
            self._sweep()
        except StoreError as error:
            _logger.warning("spans of removed rollouts stay where they are for now: %s", error)
        except Exception:  # isolation: whoever removes next, or opens or compacts the store, repeats it
            _logger.warning("spans of removed rollouts stay in %s for now", self._shown, exc_info=True)

    def _take_news(self) -> bool:
        with self._lock:
            is_new, self._is_new = self._is_new, False
        return is_new and self._quiet_s > 0


def sweep_partitions(target: DatabaseTarget) -> None:
    """Remove the spans of all rollouts that are gone from a store without shards; raises :class:`StoreError`."""
    with connected(target) as db:
        _remove(db, db, shard=0, is_partitioned=True)


def sweep(target: DatabaseTarget, placing: Placing) -> None:
    """Remove the spans of all rollouts that are gone; raises the error of the first shard that failed, at the end."""
    shards = ShardConnections(placing, stopping=threading.Event())
    failed: list[Exception] = []
    with connect(target) as control:
        for number in placing.shards:
            if not placing.is_partitioned and not control.execute(_WAITING, (number, 1)).fetchone():
                continue
            try:
                shards.open(number, limit_s=START_WAIT_S)
                with shards.guarding(number) as db:
                    _remove(control, db, shard=number, is_partitioned=placing.is_partitioned)
            except (StoreError, LostShardError, psycopg.Error) as error:
                failed.append(error)
    shards.close()
    if failed:
        raise failed[0]


def _remove(control: Connection, server: Connection, *, shard: int, is_partitioned: bool) -> None:
    if is_partitioned and not drop_unneeded(control, server, shard=shard):
        _logger.info("a partition that is not needed any more is in use, and is dropped the next time")
    while seqs := [seq for (seq,) in control.execute(_WAITING, (shard, _PAGE)).fetchall()]:
        with server.transaction():
            remove_spans(server, seqs)
        control.execute(_DONE, (seqs,))
