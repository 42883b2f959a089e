"""Removes spans of rollouts that are gone from their shards, in a thread of its own.

The control server names them in ``removals`` with the commit that removes the rollouts, so none is forgotten when a
process or a shard goes away in between: the next one that opens the store, or compacts it, goes on.
"""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psycopg

from agl.errors import StoreError
from agl_store_postgres.connections import START_WAIT_S, connect
from agl_store_postgres.placing import Placing
from agl_store_postgres.shard_connections import LostShardError, ShardConnections
from agl_store_postgres.urls import DatabaseTarget
from agl_store_postgres.writing import remove_spans

_PAGE = 1000

_WAITING = b"SELECT seq FROM removals WHERE shard = %s ORDER BY seq LIMIT %s"
_DONE = b"DELETE FROM removals WHERE seq = ANY(%s::bigint[])"

_logger = logging.getLogger(__name__)


class Sweeper:
    """Removes spans in one background thread, which lives while there is something to do."""

    def __init__(self, target: DatabaseTarget, placing: Placing) -> None:
        self._target = target
        self._placing = placing
        self._lock = threading.Lock()
        self._is_due = False
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="agl-postgres-sweep")

    def wake(self) -> None:
        """Start removing unless that has been asked for already; returns at once."""
        with self._lock, suppress(RuntimeError):  # the store is closed, and the next one that opens goes on
            if not self._is_due:
                self._executor.submit(self._run)
                self._is_due = True

    def close(self) -> None:
        """Finish what was asked for. Blocks; a shard that does not answer is left to the next store object."""
        self._executor.shutdown(wait=True)

    def _run(self) -> None:
        with self._lock:
            self._is_due = False
        try:
            sweep(self._target, self._placing)
        except StoreError as error:
            _logger.warning("spans of removed rollouts stay on a shard for now: %s", error)
        except Exception:  # isolation: whoever removes next, or opens or compacts the store, repeats it
            _logger.warning(
                "spans of removed rollouts stay on a shard of %s for now", self._target.shown, exc_info=True
            )


def sweep(target: DatabaseTarget, placing: Placing) -> None:
    """Remove the spans of all rollouts that are gone; raises the error of the first shard that failed, at the end."""
    shards = ShardConnections(placing, stopping=threading.Event())
    failed: list[Exception] = []
    with connect(target) as control:
        for number in placing.shards:
            while seqs := [seq for (seq,) in control.execute(_WAITING, (number, _PAGE)).fetchall()]:
                try:
                    shards.open(number, limit_s=START_WAIT_S)
                    with shards.guarding(number) as db, db.transaction():
                        remove_spans(db, seqs)
                except (StoreError, LostShardError, psycopg.Error) as error:
                    failed.append(error)
                    break
                control.execute(_DONE, (seqs,))
    shards.close()
    if failed:
        raise failed[0]
