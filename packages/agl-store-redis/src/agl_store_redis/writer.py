"""Runs writes: those that wait together are one transaction, which is repeated after lost connections and collisions.

A transaction is two scripts with Python in between. The first one loads what the operations need; the second one
compares that with what is there by then, and writes all changes at one moment, or none. Redis's own ``WATCH`` and
``MULTI`` would have to watch whole keys, such as the queue, so that claims would undo each other; and rules in Lua
would be a second copy of those that all stores share. Queued rollouts are the one thing that everybody wants at
once: the first script takes them out of the queue, so that claims of several machines never meet. A machine that dies
in between leaves them out for a few seconds.

The second script keeps the number of each writer's last transaction. If a connection breaks before its answer, the
writer sends the same script with the same number again, and a transaction that took place is not repeated.
"""

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from redis.exceptions import RedisError

from agl.errors import StoreError
from agl.stores import Work, expire
from agl_store_redis.connections import Moves, Server, access_of
from agl_store_redis.faults import is_elsewhere, is_lost
from agl_store_redis.loading import Loaded, begin, begin_lapsed
from agl_store_redis.urls import ServerTarget
from agl_store_redis.writing import Commit
from agl_store_sqlite.sql.batches import perform
from agl_store_sqlite.sql.loaded_tables import LoadedTables
from agl_store_sqlite.sql.needs import Needs, needs_of
from agl_store_sqlite.sql.packing import Packer
from agl_store_sqlite.sql.servers import RESTART_WAIT_S, ThreadConnection

T = TypeVar("T")

COLLISIONS_S = 30.0
"""Seconds for which a transaction is repeated after collisions with others; each collision means that one succeeded."""

_PAUSE_S = 0.1
"""Seconds before the search for the server that is in charge begins anew."""


class BatchWriter:
    """Runs batches of work on one connection; used by one thread."""

    def __init__(self, target: ServerTarget, *, server: Server, stopping: threading.Event, moves: Moves) -> None:
        self._target = target
        self._stopping = stopping
        self._moves = moves
        self._connection = ThreadConnection(
            access_of(target), stopping=stopping, epoch=lambda: moves.count, current=server
        )
        self._packer = Packer()
        self._name = uuid.uuid4().hex
        self._number = 0
        self._held: Sequence[str] = ()

    def close(self) -> None:
        """Remove the stored number of this writer's last transaction, and close the connection."""
        server = self._connection.current
        if server is not None and self._number:
            with suppress(RedisError, OSError):  # the server removes it after a day
                server.run("UNLINK", f"{self._target.base}w/{self._name}")
        self._connection.drop()

    def __call__(self, works: Sequence[Work[Any]]) -> Sequence[Any]:
        """Run a batch and return the answers after the commit; raises redis-py's errors, or a StoreError."""
        needs = [needs_of(work) for work in works]
        end = time.monotonic() + COLLISIONS_S
        try:
            while True:
                loaded = self._begin(needs)
                tables = LoadedTables(loaded.rows, self._packer)
                answers = perform(works, tables)
                tables.changes.has_queued |= tables.has_spare
                if self._commit(loaded, tables):
                    return answers
                if time.monotonic() > end:
                    raise StoreError(
                        f"the store {self._target.shown} was changed by others each time for {COLLISIONS_S:g} s; "
                        "nothing was written: try again, with fewer programs that write to the same rollouts"
                    )
        except BaseException:
            self._packer.clear()  # the packer's marks may refer to spans that are not stored
            raise

    def _begin(self, needs: Sequence[Needs]) -> Loaded:
        """Decide overdue attempts, then load the data that operations need."""
        times = 1
        while True:
            start = partial(begin, base=self._target.base, needs=needs, held=self._held, times=times)
            loaded = self._repeated(start)
            self._held = list(loaded.held.values())
            if loaded.is_short:
                times *= 2
                continue
            if not loaded.is_overdue:
                return loaded
            lapsed = self._repeated(lambda server: begin_lapsed(server, self._target.base))
            tables = LoadedTables(lapsed.rows, self._packer, lapsed=lapsed.lapsed)
            expire(tables)
            self._commit(lapsed, tables)  # if it fails, another process decides these attempts

    def _commit(self, loaded: Loaded, tables: LoadedTables) -> bool:
        """Write the changes; if others have changed the loaded data, write nothing and return false."""
        commit = Commit(loaded, tables)
        if commit.is_empty:
            return True
        self._number += 1
        number = self._number
        is_written = self._repeated(
            lambda server: commit.run(server, self._target.base, writer=self._name, number=number)
        )
        if is_written:
            self._held = ()
        else:
            self._packer.clear()
        return is_written

    def _repeated(self, act: Callable[[Server], T]) -> T:
        """Call ``act`` with a connection until it succeeds, for as long as a server may take to restart."""
        end = time.monotonic() + RESTART_WAIT_S
        has_moved = False
        while True:
            server = self._connection.open()
            try:
                answer = act(server)
                self._moves.count += has_moved  # only now, because earlier the name still led to the old server
                return answer
            except (RedisError, OSError) as error:
                if not is_lost(error) or time.monotonic() > end:
                    raise
                self._connection.drop()
                if is_elsewhere(error):
                    has_moved = True
                    if self._stopping.wait(_PAUSE_S):
                        raise
            except BaseException:
                self._connection.drop()  # an answer may still be under way
                raise
