"""``redis://host:6379/0?prefix=agl``: the keys of one prefix of a Redis or Valkey server, for many machines at once.

Every write is acknowledged after the server has written it to the log and, unless the URL says otherwise, to disk. A
store object has one thread that writes all waiting work together, a few threads that read, and one that listens for
changes once a caller waits; each has its own connection. A commit wakes waiting callers on every machine. Leases and
time limits use the server's clock. If the server goes away, the store waits for it for about half a minute.

Everything lies in the server's memory, and in one slot of a Cluster: a Cluster spreads stores, never one store.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from agl.stores import TableStore
from agl_store_redis._reads import RedisReads, VanishedError
from agl_store_redis.connections import Moves, Server, access_of
from agl_store_redis.faults import explain, is_lost
from agl_store_redis.layout import prepare
from agl_store_redis.promises import check_server
from agl_store_redis.scripts import call
from agl_store_redis.urls import ServerTarget, target_of
from agl_store_redis.writer import BatchWriter
from agl_store_sqlite.sql.batches import Batches, Look, OverdueError, answer_to
from agl_store_sqlite.sql.servers import (
    START_WAIT_S,
    BatchReader,
    Channel,
    Message,
    ServerBackend,
    ThreadConnection,
    UncheckedRead,
    read_message,
)


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
        super().__init__(_backend(target_of(url)))


def _backend(target: ServerTarget) -> ServerBackend:
    stopping, moves = threading.Event(), Moves()
    write = BatchWriter(target, server=_open(target), stopping=stopping, moves=moves)
    read = _reader_of(target, stopping=stopping, moves=moves)
    batches = partial(
        Batches[Any], shown_url=target.shown, explain=partial(explain, shown=target.shown), is_shared=is_lost
    )
    return ServerBackend(
        target.shown,
        writer=batches(write),
        reader=batches(read, threads=target.readers),
        subscribe=_channel_to(target, stopping=stopping, moves=moves),
        closing=(write, read),
        stopping=stopping,
    )


def _reader_of(target: ServerTarget, *, stopping: threading.Event, moves: Moves) -> BatchReader[Server]:
    """Make a reader whose connections follow the writer's; no read is answered while an attempt is overdue."""

    def read_all(server: Server, looks: Sequence[Look]) -> list[Any]:
        now, deadline = _read_clock(server, target.base)
        is_overdue = deadline is not None and deadline <= now
        return [
            OverdueError() if is_overdue and not isinstance(look, UncheckedRead) else _answer(server, target.base, look)
            for look in looks
        ]

    access = access_of(target)
    return BatchReader(
        access,
        connection=lambda: ThreadConnection(access, stopping=stopping, epoch=lambda: moves.count),
        read_all=read_all,
    )


def _answer(server: Server, base: str, look: Look) -> Any:
    while True:
        try:
            return answer_to(look, RedisReads(server, base))
        except VanishedError:
            continue  # each time, somebody removed another rollout of the page


def _read_clock(server: Server, base: str) -> tuple[float, float | None]:
    """Return the server's time and the next deadline, in Unix seconds."""
    seconds, micros, due = call(server, "clock", base)
    return int(seconds) + int(micros) / 1e6, float(due) if due else None


def _open(target: ServerTarget) -> Server:
    """Open the first connection, and check the server and the layout of the store."""
    server = access_of(target).connect_in_time(threading.Event(), limit_s=START_WAIT_S)
    try:
        check_server(server, target)
        prepare(server, target)
    except BaseException as error:
        server.close()
        if isinstance(error, RedisError | OSError):
            raise explain(error, target.shown) from error
        raise
    return server


def _channel_to(target: ServerTarget, *, stopping: threading.Event, moves: Moves) -> Callable[[], Channel]:
    """Return a function that opens a channel for the messages of commits, with separate connections."""

    def subscribe() -> Channel:
        connection = ThreadConnection(access_of(target), stopping=stopping, epoch=lambda: moves.count)
        try:
            return _CommitChannel(connection, target.base)
        except BaseException:
            connection.drop()
            raise

    return subscribe


class _CommitChannel:
    """Implements :class:`agl_store_sqlite.sql.servers.Channel`."""

    def __init__(self, connection: ThreadConnection[Server], base: str) -> None:
        self._connection, self._base = connection, base
        self._server = connection.open()
        self._messages: Any = self._server.listen()
        self._messages.subscribe(f"{base}changes")
        self._messages.get_message(timeout=10.0)

    @property
    def is_outdated(self) -> bool:
        return self._connection.is_outdated

    def clock(self) -> tuple[float, float | None]:
        return _read_clock(self._server, self._base)

    def wait(self, limit_s: float) -> Iterable[Message]:
        message: Any = self._messages.get_message(timeout=limit_s)
        if message is None or message["type"] != "message":
            return []
        return [read_message(message["data"].decode())]

    def interrupt(self) -> None:
        # Breaks the connection on which the thread waits; the thread may be closing it just now.
        with suppress(Exception):
            self._messages.connection.disconnect()

    def close(self) -> None:
        self._messages.close()
        self._connection.drop()
