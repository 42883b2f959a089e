"""Messages of commits, by redis-py's reader of messages."""

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from agl_store_redis.connections import Moves, Server, access_of
from agl_store_redis.reader import read_clock
from agl_store_redis.urls import ServerTarget
from agl_store_sqlite.sql.servers import Channel, Message, ThreadConnection, read_message


def channel_to(target: ServerTarget, *, stopping: threading.Event, moves: Moves) -> Callable[[], Channel]:
    """Return what opens a channel with connections of its own."""

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
        return read_clock(self._server, self._base)

    def wait(self, limit_s: float) -> Iterable[Message]:
        message: Any = self._messages.get_message(timeout=limit_s)
        if message is None or message["type"] != "message":
            return []
        return [read_message(message["data"].decode())]

    def interrupt(self) -> None:
        with suppress(
            Exception
        ):  # breaks the connection on which the thread waits; the thread may be closing it just now
            self._messages.connection.disconnect()

    def close(self) -> None:
        self._messages.close()
        self._connection.drop()
