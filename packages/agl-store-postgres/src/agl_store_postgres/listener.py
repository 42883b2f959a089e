"""Receives the messages of commits by ``LISTEN``, or by polling through a pooler, which passes no messages on."""

import math
import selectors
import socket
import threading
from collections.abc import Callable, Iterable

from psycopg import sql

from agl_store_postgres.connections import Connection, access_of
from agl_store_postgres.loading import NOW
from agl_store_postgres.urls import DatabaseTarget
from agl_store_postgres.writing import channel_of
from agl_store_sqlite.sql.servers import RESTART_WAIT_S, Channel, Message, read_message

POLL_S = 0.2
"""Seconds between two looks at the feed and the queue through a pooler."""

_DEADLINE = b"(SELECT min(deadline) FROM attempts WHERE status = 'running')"
_CLOCK = b"SELECT " + NOW + b", " + _DEADLINE
_LOOK = b"SELECT (SELECT max(cursor) FROM changes), (SELECT max(seq) FROM rollouts WHERE status = 'queued')"


def channel_to(target: DatabaseTarget, *, feed: int, stopping: threading.Event) -> Callable[[], Channel]:
    """Return a function that opens a channel with a separate connection."""

    def subscribe() -> Channel:
        db = access_of(target).connect_in_time(stopping, limit_s=RESTART_WAIT_S)
        try:
            return _CommitChannel(db, feed=feed, is_polled=target.is_pooled)
        except BaseException:
            db.close()
            raise

    return subscribe


class _CommitChannel:
    """Implements :class:`agl_store_sqlite.sql.servers.Channel`."""

    is_outdated = False

    def __init__(self, db: Connection, *, feed: int, is_polled: bool) -> None:
        self._db, self._is_polled = db, is_polled
        self._heard: list[str] = []
        if is_polled:
            self._known = db.execute(_LOOK).fetchone()
        else:
            db.add_notify_handler(lambda notify: self._heard.append(notify.payload))  # messages that come with answers
            db.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel_of(feed))))
        self._wake, self._woken = socket.socketpair()

    def clock(self) -> tuple[float, float | None]:
        ((now, deadline),) = self._db.execute(_CLOCK).fetchall()
        return now, deadline

    def wait(self, limit_s: float) -> Iterable[Message]:
        if self._is_polled:
            self._sleep(min(limit_s, POLL_S))
            return self._polled()
        if not self._heard:
            self._sleep(limit_s, self._db.fileno())
        self._db.pgconn.consume_input()
        while (notify := self._db.pgconn.notifies()) is not None:
            self._heard.append(notify.extra.decode())
        heard, self._heard = self._heard, []
        return map(read_message, heard)

    def _polled(self) -> Iterable[Message]:
        """Return one message: whether the feed or the queue changed since the last look, and the next deadline."""
        found = self._db.execute(_LOOK).fetchone()
        has_grown, self._known = found != self._known, found
        now, deadline = self.clock()
        return [(has_grown, has_grown, math.inf if deadline is None or deadline <= now else deadline)]

    def _sleep(self, limit_s: float, *descriptors: int) -> None:
        with selectors.DefaultSelector() as selector:  # select.select refuses descriptors from 1024 on
            for each in (self._woken, *descriptors):
                selector.register(each, selectors.EVENT_READ)
            selector.select(limit_s)

    def interrupt(self) -> None:
        self._wake.send(b"x")

    def close(self) -> None:
        self._db.close()
        self._wake.close()
        self._woken.close()
