"""Runs reads in a few threads, each with a connection of its own."""

import threading
import time
from collections.abc import Sequence
from typing import Any

from redis.exceptions import RedisError

from agl.stores import Reads
from agl_store_redis import connections
from agl_store_redis._reads import RedisReads, VanishedError
from agl_store_redis.connections import Moves, Server, ThreadConnection
from agl_store_redis.faults import is_lost
from agl_store_redis.scripts import call
from agl_store_redis.urls import ServerTarget
from agl_store_sqlite.sql import Look, OverdueError, answer_to


class UncheckedRead:
    """A read that is answered even while attempts are overdue."""

    def __init__(self, look: Look) -> None:
        self._look = look

    def __call__(self, reads: Reads) -> Any:
        """Return the answer of the read."""
        return self._look(reads)


class BatchReader:
    """Runs batches of reads, on one connection of its own per calling thread."""

    def __init__(self, target: ServerTarget, *, stopping: threading.Event, moves: Moves) -> None:
        self._target = target
        self._stopping = stopping
        self._moves = moves
        self._local = threading.local()
        self._connections: list[ThreadConnection] = []

    def close(self) -> None:
        """Close the connections."""
        while self._connections:
            self._connections.pop().drop()

    def __call__(self, looks: Sequence[Look]) -> Sequence[Any]:
        """Return the answers; :class:`OverdueError` for reads that have to wait for the writer."""
        connection = self._connection()
        end = time.monotonic() + connections.RESTART_WAIT_S
        while True:
            server = connection.open()
            try:
                return self._read_all(server, looks)
            except BaseException as error:
                is_answered = isinstance(error, RedisError) and not is_lost(error)
                if not is_answered:
                    connection.drop()  # an answer may still be under way
                if not is_lost(error) or time.monotonic() > end:
                    raise

    def _connection(self) -> ThreadConnection:
        connection: ThreadConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = ThreadConnection(self._target, stopping=self._stopping, moves=self._moves)
            self._local.connection = connection
            self._connections.append(connection)
        return connection

    def _read_all(self, server: Server, looks: Sequence[Look]) -> list[Any]:
        now, deadline = read_clock(server, self._target.base)
        is_overdue = deadline is not None and deadline <= now
        return [
            OverdueError() if is_overdue and not isinstance(look, UncheckedRead) else self._answer(server, look)
            for look in looks
        ]

    def _answer(self, server: Server, look: Look) -> Any:
        while True:
            try:
                return answer_to(look, RedisReads(server, self._target.base))
            except VanishedError:
                continue  # each time, somebody removed another rollout of the page


def read_clock(server: Server, base: str) -> tuple[float, float | None]:
    """Return the server's time and the next deadline, in Unix seconds."""
    seconds, micros, due = call(server, "clock", base)
    return int(seconds) + int(micros) / 1e6, float(due) if due else None
