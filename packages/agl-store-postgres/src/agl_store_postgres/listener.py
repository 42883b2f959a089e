"""Listens for changes in a thread of the store: wakes waiting callers, and gets overdue attempts decided in time."""

import logging
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable

import psycopg
from psycopg import sql

from agl.stores import WakeUp
from agl_store_postgres.connections import Connection, ThreadConnection
from agl_store_postgres.loading import NOW
from agl_store_postgres.urls import DatabaseTarget
from agl_store_postgres.writing import channel_of, read_message

LOOK_S = 2.0
"""Seconds between two looks of waiting claims that no message woke. A claim skips rollouts that another one has locked,
and gets no message if that one's machine dies before it commits."""

POLL_S = 0.2
"""Seconds between two looks at the feed and the queue through a pooler, which passes no messages on."""

_CLOCK = b"SELECT " + NOW + b", (SELECT min(deadline) FROM attempts WHERE status = 'running')"
_LOOK = b"SELECT (SELECT max(cursor) FROM changes), (SELECT max(seq) FROM rollouts WHERE status = 'queued')"
_RETRY_S = 1.0
_PAUSE_S = 0.05
"""Seconds between two looks at overdue attempts that another machine is deciding."""

_logger = logging.getLogger(__name__)


class ChangeListener:
    """Listens for messages of commits, from the first wait of a caller until it is closed.

    Args:
        wake_ups: The first is rung when rollouts were queued, the second when the change feed grew.
        expire: Submits the decision of overdue attempts; returns at once.
    """

    def __init__(
        self, target: DatabaseTarget, *, feed: int, wake_ups: tuple[WakeUp, WakeUp], expire: Callable[[], object]
    ) -> None:
        self._target = target
        self._feed = feed
        self._expire = expire
        self._queued, self._changed = wake_ups
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake, self._woken = socket.socketpair()
        self._deadline = math.inf
        self._heard: list[str] = []

    def start(self) -> None:
        """Start listening unless it has started; all waiting callers are woken once it listens."""
        with self._lock:
            if self._thread is None and not self._stopping.is_set():
                self._thread = threading.Thread(target=self._run, name="agl-postgres-watch", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop listening and wake all waiting callers. Blocks until the thread ends."""
        with self._lock:
            if not self._stopping.is_set():
                self._stopping.set()
                self._wake.send(b"x")
        if self._thread is not None:
            self._thread.join()
        self._wake.close()
        self._woken.close()
        self._wake_all()

    def hear_own(self) -> None:
        """Wake waiting callers after a commit of this process, whose message a pooler does not pass on."""
        if self._target.is_pooled:
            self._wake_all()

    def _run(self) -> None:
        connection = ThreadConnection(self._target, stopping=self._stopping)
        has_warned = False
        watch = self._poll if self._target.is_pooled else self._listen
        while not self._stopping.is_set():
            try:
                watch(connection.open())
            except Exception:  # isolation: waiting callers depend on this thread
                if not has_warned and not self._stopping.is_set():
                    _logger.warning(
                        "waiting callers are not woken by changes in %s until it answers",
                        self._target.shown,
                        exc_info=True,
                    )
                has_warned = True
                self._stopping.wait(_RETRY_S)
                self._wake_all()  # waiting callers find out by their own reads that the server is away
            connection.drop()

    def _listen(self, db: Connection) -> None:
        db.add_notify_handler(self._hear)
        db.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel_of(self._feed))))
        self._look(db)
        self._wake_all()
        looked_at = time.monotonic()
        while not self._stopping.is_set():
            self._pause(db, LOOK_S - (time.monotonic() - looked_at))
            self._take_messages(db)
            is_due = self._deadline <= time.monotonic()
            if is_due:
                self._expire()
            if is_due or time.monotonic() - looked_at >= LOOK_S:
                self._look(db)
                looked_at = time.monotonic()
                if not is_due:
                    self._queued.ring()

    def _poll(self, db: Connection) -> None:
        """Look at the feed and the queue often, instead of waiting for messages."""
        known: tuple[object, ...] | None = None
        rung_at = time.monotonic()
        while not self._stopping.is_set():
            if self._deadline <= time.monotonic():
                self._expire()
            self._look(db)
            found = db.execute(_LOOK).fetchone()
            if found != known:
                known, rung_at = found, time.monotonic()
                self._wake_all()
            elif time.monotonic() - rung_at >= LOOK_S:
                rung_at = time.monotonic()
                self._queued.ring()
            self._pause(db, POLL_S)

    def _pause(self, db: Connection, limit_s: float) -> None:
        wait_s = max(0.0, min(limit_s, self._deadline - time.monotonic()))
        if not self._heard:
            with selectors.DefaultSelector() as selector:  # select.select refuses descriptors from 1024 on
                for each in (db.fileno(), self._woken):
                    selector.register(each, selectors.EVENT_READ)
                selector.select(wait_s)

    def _take_messages(self, db: Connection) -> None:
        """Read the messages that came while this thread slept; :meth:`_hear` gets those that come with an answer."""
        db.pgconn.consume_input()
        while (notify := db.pgconn.notifies()) is not None:
            self._heard.append(notify.extra.decode())
        heard, self._heard = self._heard, []
        messages = [read_message(message) for message in heard]
        for _, _, soonest in messages:
            self._note(soonest)
        if any(has_queued for has_queued, _, _ in messages):
            self._queued.ring()
        if any(has_grown for _, has_grown, _ in messages):
            self._changed.ring()

    def _hear(self, notify: psycopg.Notify) -> None:
        self._heard.append(notify.payload)

    def _look(self, db: Connection) -> None:
        """Read the server's clock and the next deadline."""
        row = db.execute(_CLOCK).fetchone()
        assert row is not None  # noqa: S101 - a SELECT without FROM gives one row
        now, deadline = row
        self._offset = time.monotonic() - now
        self._deadline = math.inf
        if deadline is not None:
            self._note(max(deadline, now + _PAUSE_S))

    def _note(self, deadline: float) -> None:
        """Take note of a deadline, converted from the server's clock to this machine's monotonic one."""
        self._deadline = min(self._deadline, deadline + self._offset)

    def _wake_all(self) -> None:
        self._queued.ring()
        self._changed.ring()
