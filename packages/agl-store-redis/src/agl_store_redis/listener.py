"""Listens for changes in a thread of the store: wakes waiting callers, and gets overdue attempts decided in time."""

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from agl.stores import WakeUp
from agl_store_redis.connections import Moves, Server, ThreadConnection
from agl_store_redis.reader import read_clock
from agl_store_redis.urls import ServerTarget
from agl_store_redis.writing import read_message

LOOK_S = 2.0
"""Seconds between two looks of waiting claims that no message woke: a machine that dies while it claims leaves queued
rollouts out of the queue for a few seconds, and sends no message."""

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
        self, target: ServerTarget, *, wake_ups: tuple[WakeUp, WakeUp], expire: Callable[[], object], moves: Moves
    ) -> None:
        self._target = target
        self._expire = expire
        self._queued, self._changed = wake_ups
        self._stopping = threading.Event()
        self._connection = ThreadConnection(target, stopping=self._stopping, moves=moves)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._messages: Any = None
        self._deadline = math.inf
        self._offset = 0.0

    def start(self) -> None:
        """Start listening unless it has started; all waiting callers are woken once it listens."""
        with self._lock:
            if self._thread is None and not self._stopping.is_set():
                self._thread = threading.Thread(target=self._run, name="agl-redis-watch", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop listening and wake all waiting callers. Blocks until the thread ends."""
        with self._lock:
            self._stopping.set()
            self._interrupt()
        if self._thread is not None:
            self._thread.join()
        self._wake_all()

    def _interrupt(self) -> None:
        """Break the connection on which the thread waits."""
        connection = self._messages and self._messages.connection
        if connection is not None:
            with suppress(Exception):  # the thread may be closing it just now
                connection.disconnect()

    def _run(self) -> None:
        has_warned = False
        while not self._stopping.is_set():
            try:
                self._listen(self._connection.open())
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
            self._connection.drop()

    def _listen(self, server: Server) -> None:
        with server.listen() as messages:
            messages.subscribe(f"{self._target.base}changes")
            messages.get_message(timeout=10.0)
            with self._lock:
                self._messages = messages
            try:
                self._hear(server, messages)
            finally:
                with self._lock:
                    self._messages = None

    def _hear(self, server: Server, messages: Any) -> None:
        self._look(server)
        self._wake_all()
        looked_at = time.monotonic()
        while not self._stopping.is_set() and not self._connection.is_outdated:
            wait_s = min(LOOK_S - (time.monotonic() - looked_at), self._deadline - time.monotonic())
            self._take(messages.get_message(timeout=max(0.0, wait_s)))
            is_due = self._deadline <= time.monotonic()
            if is_due:
                self._expire()
            if is_due or time.monotonic() - looked_at >= LOOK_S:
                self._look(server)
                looked_at = time.monotonic()
                if not is_due:
                    self._queued.ring()

    def _take(self, message: Any) -> None:
        if message is None or message["type"] != "message":
            return
        has_queued, has_grown, soonest = read_message(message["data"])
        self._note(soonest)
        if has_queued:
            self._queued.ring()
        if has_grown:
            self._changed.ring()

    def _look(self, server: Server) -> None:
        """Read the server's clock and the next deadline."""
        now, deadline = read_clock(server, self._target.base)
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
