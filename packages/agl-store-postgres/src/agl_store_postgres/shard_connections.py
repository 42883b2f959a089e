"""Holds the connections of one thread to the shards."""

import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

import psycopg

from agl_store_postgres.connections import Connection, access_of
from agl_store_postgres.faults import is_lost
from agl_store_postgres.placing import Placing
from agl_store_postgres.shard_layout import connect_shard


class LostShardError(Exception):
    """Raised when the connection to a shard breaks in a transaction; the transaction must be repeated."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class ShardConnections:
    """The connections of one thread to the shards, opened on demand.

    Args:
        stopping: Set when the store is closed; ends every wait for a server.
    """

    def __init__(self, placing: Placing, *, stopping: threading.Event) -> None:
        self._placing = placing
        self._stopping = stopping
        self._open: dict[int, Connection] = {}

    def is_open(self, number: int) -> bool:
        """Return true if there is a connection to the shard."""
        return number in self._open and not self._open[number].closed

    def open(self, number: int, *, limit_s: float) -> Connection:
        """Return the connection to a shard; if there is none, try to connect for ``limit_s`` seconds, at least once.

        Raises:
            StoreError: The shard cannot be used.
            UnnamedShardError: The store's URL does not name it.
        """
        if not self.is_open(number):
            shard = self._placing.shard(number)
            access = replace(access_of(shard.target), connect=partial(connect_shard, shard))
            self._open[number] = access.connect_in_time(self._stopping, limit_s=limit_s)
        return self._open[number]

    @contextmanager
    def guarding(self, number: int) -> Generator[Connection]:
        """Use the open connection to a shard in a ``with`` block; if it breaks, drop it and raise a LostShardError."""
        if not self.is_open(number):
            raise LostShardError(number)
        db = self._open[number]
        try:
            yield db
        except psycopg.Error as error:
            if is_lost(error, db):
                self.drop(number)
                raise LostShardError(number) from error
            raise

    def rollback(self) -> None:
        """End the transactions that are open."""
        for number, db in list(self._open.items()):
            if db.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                try:
                    db.rollback()
                except psycopg.Error:
                    self.drop(number)

    def drop(self, number: int) -> None:
        """Close the connection to a shard."""
        db = self._open.pop(number, None)
        if db is not None:
            with suppress(psycopg.Error):
                db.close()

    def close(self) -> None:
        """Close all connections."""
        for number in list(self._open):
            self.drop(number)
