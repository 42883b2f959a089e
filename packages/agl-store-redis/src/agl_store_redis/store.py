"""``redis://host:6379/0?prefix=agl``: the keys of one prefix of a Redis or Valkey server, for many machines at once.

Every write is acknowledged after the server has written it to its log, and, as far as the URL does not say otherwise,
to its disk. A store object has one thread that writes all waiting work together, a few threads that read, and one that
listens for changes once a caller waits; each has its own connection. A commit wakes waiting callers on every machine.
Leases and time limits use the server's clock. If the server goes away, the store waits for it for about half a minute.

Everything lies in the server's memory, and in one slot of a Cluster: a Cluster spreads stores, never one store.
"""

import threading
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from agl.stores import TableStore
from agl_store_redis.connections import Moves, Server, access_of
from agl_store_redis.faults import explain, is_lost
from agl_store_redis.layout import prepare
from agl_store_redis.listener import channel_to
from agl_store_redis.promises import check_server
from agl_store_redis.reader import reader_of
from agl_store_redis.urls import ServerTarget, target_of
from agl_store_redis.writer import BatchWriter
from agl_store_sqlite.sql.batches import Batches
from agl_store_sqlite.sql.servers import START_WAIT_S, ServerBackend


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
    read = reader_of(target, stopping=stopping, moves=moves)
    batches = partial(
        Batches[Any], shown_url=target.shown, explain=partial(explain, shown=target.shown), is_shared=is_lost
    )
    return ServerBackend(
        target.shown,
        writer=batches(write),
        reader=batches(read, threads=target.readers),
        subscribe=channel_to(target, stopping=stopping, moves=moves),
        closing=(write, read),
        stopping=stopping,
    )


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
