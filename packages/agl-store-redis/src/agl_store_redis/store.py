"""``redis://host:6379/0?prefix=agl``: the keys of one prefix of a Redis or Valkey server, for many machines at once.

Every write is acknowledged after the server has written it to its log, and, as far as the URL does not say otherwise,
to its disk. A store object has one thread that writes all waiting work together, a few threads that read, and one that
listens for changes once a caller waits; each has its own connection. A commit wakes waiting callers on every machine.
Leases and time limits use the server's clock. If the server goes away, the store waits for it for about half a minute.

Everything lies in the server's memory, and in one slot of a Cluster: a Cluster spreads stores, never one store.
"""

import asyncio
import math
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from redis.exceptions import RedisError

from agl.stores import Reads, Tables, TableStore, WakeUp, Work
from agl_store_redis.connections import START_WAIT_S, Moves, Server, connect, connect_in_time, forked_error
from agl_store_redis.faults import explain, is_lost
from agl_store_redis.layout import CURRENT, prepare
from agl_store_redis.listener import ChangeListener
from agl_store_redis.migration import count_all
from agl_store_redis.promises import check_server
from agl_store_redis.reader import BatchReader, UncheckedRead
from agl_store_redis.urls import ServerTarget, target_of
from agl_store_redis.writer import BatchWriter
from agl_store_sqlite.sql import Batches, OverdueError

T = TypeVar("T")


class RedisStore(TableStore):
    """A :class:`agl.contracts.Store` under one prefix of a Redis or Valkey server.

    It may be used from several threads and event loops at once. A forked process must open its own.

    Args:
        url: ``redis://user:password@host:port/database``, also ``rediss``, ``valkey`` and ``valkeys``. Options are
            ``prefix`` (default ``agl``), ``durability`` (``always`` by default, ``second`` or ``none``: what the
            server's configuration has to promise), ``readers`` (default 4), the most connections for reads, and with
            TLS ``ca``, ``cert`` and ``key``, paths of PEM files.

    Raises:
        ConfigError: The URL cannot be read.
        SchemaVersionError: A newer release wrote the store.
        StoreError: The server cannot be used, or would lose or evict what it acknowledges; the message gives reason
            and remedy, and no password.
    """

    def __init__(self, url: str) -> None:
        super().__init__(_Redis(target_of(url)))


class _Redis:
    """Implements :class:`agl.stores.Backend`."""

    def __init__(self, target: ServerTarget) -> None:
        self.shown_url = target.shown
        self._target = target
        self._pid = os.getpid()
        self._stopping = threading.Event()
        told = partial(explain, shown=target.shown)
        moves = Moves()
        self._write = BatchWriter(target, server=_open(target), stopping=self._stopping, moves=moves)
        self._writer = Batches(self._write, shown_url=target.shown, explain=told, is_shared=is_lost)
        self._read = BatchReader(target, stopping=self._stopping, moves=moves)
        self._reader = Batches(
            self._read, shown_url=target.shown, explain=told, is_shared=is_lost, threads=target.readers
        )
        self.queued, self.changed = WakeUp(on_wait=self._on_wait), WakeUp(on_wait=self._on_wait)
        wake_ups = (self.queued, self.changed)
        self._listener = ChangeListener(target, wake_ups=wake_ups, expire=self._expire, moves=moves)

    async def write(self, work: Work[T]) -> T:
        self._check_process()
        return await self._writer.run(work, undo=work.undo)

    async def read(self, look: Callable[[Reads], T]) -> T:
        self._check_process()
        try:
            return await self._reader.run(look)
        except OverdueError:
            await self._writer.run(Work(act=_do_nothing))
        return await self._reader.run(UncheckedRead(look))

    async def close(self) -> None:
        if os.getpid() == self._pid:
            await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._stopping.set()
        self._writer.close()
        self._write.close()
        self._reader.close()
        self._read.close()
        self._listener.close()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise forked_error(self._target)

    def _on_wait(self) -> float:
        self._listener.start()
        return math.inf

    def _expire(self) -> None:
        """Submit empty work: the writer decides overdue attempts before any work."""
        self._writer.submit(Work(act=_do_nothing))


def _do_nothing(_: Tables) -> None:
    """Do nothing; the transaction around it still decides overdue attempts."""


def _open(target: ServerTarget) -> Server:
    """Open the first connection, and check the server and the layout of the store."""
    server = connect_in_time(lambda: connect(target), target, threading.Event(), limit_s=START_WAIT_S)
    try:
        check_server(server, target)
        if prepare(server, target) < CURRENT:
            count_all(server, target)
    except BaseException as error:
        server.close()
        if isinstance(error, RedisError | OSError):
            raise explain(error, target.shown) from error
        raise
    return server
