"""Shared parts of stores on a server: connections of threads, readers, the listener, and the backend above them.

A store object has threads that write, a few that read, and one that listens for changes as soon as a caller waits; each
has a separate connection. A :class:`ServerAccess` makes connections to a server and interprets their errors.
"""

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from agl.errors import StoreError
from agl.stores import Reads, Tables, WakeUp, Work
from agl_store_sqlite.sql.batches import Batches, Look, OverdueError

T = TypeVar("T")


class Closable(Protocol):
    """An object with connections or threads to close."""

    def close(self) -> None:
        """Close the connections and end the threads; blocks until that is done."""
        ...


C = TypeVar("C", bound=Closable)

START_WAIT_S = 4.0
"""Seconds to wait for a server that never answered."""

RESTART_WAIT_S = 30.0
"""Seconds to wait for a server that has answered before and may be restarting."""

LOOK_S = 2.0
"""Seconds after which waiting claims look again without a message: a machine that dies during a claim may hold queued
rollouts for a moment, and sends no message when they become free."""

_DELAYS_S = (0.05, 0.2, 0.5, 1.0)
_RETRY_S = 1.0
_PAUSE_S = 0.05
"""Seconds before looking again at overdue attempts that another machine is deciding."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServerAccess(Generic[C]):
    """A server and the meaning of its library's errors.

    Attributes:
        shown: The store's URL for messages, without a password.
        connect: Opens a connection; the library's errors pass through.
        errors: The library's errors.
        is_passing: Returns true for an error after which the server may soon accept a connection.
        is_lost: Returns true if an error means that the connection, and with it the transaction, is gone.
        is_usable: Returns true if a connection can be used again after any other error; may roll back.
        explain: Converts an error of the library into one that names a remedy.
    """

    shown: str
    connect: Callable[[], C]
    errors: tuple[type[Exception], ...]
    is_passing: Callable[[Any], bool]
    is_lost: Callable[[BaseException, C], bool]
    is_usable: Callable[[BaseException, C], bool]
    explain: Callable[[Exception, str], Exception]

    def connect_in_time(self, stopping: threading.Event, *, limit_s: float) -> C:
        """Connect, retrying for ``limit_s`` seconds while the server is unreachable; raise errors with a remedy."""
        end = time.monotonic() + limit_s
        delays = iter(_DELAYS_S)
        while True:
            try:
                return self.connect()
            except self.errors as error:
                is_late = not self.is_passing(error) or time.monotonic() > end
                if is_late or stopping.wait(next(delays, _DELAYS_S[-1])):
                    raise self.explain(error, self.shown) from error


class ThreadConnection(Generic[C]):
    """The connection of one thread of an open store, opened on demand.

    Args:
        stopping: Set when the store is closed; ends every wait for the server.
        epoch: Returns a number that grows when another server may have taken over; a connection that is older is then
            replaced.
        current: The first connection, if it is open already.
    """

    def __init__(
        self,
        access: ServerAccess[C],
        *,
        stopping: threading.Event,
        epoch: Callable[[], int] = lambda: 0,
        current: C | None = None,
    ) -> None:
        self._access, self._stopping, self._epoch = access, stopping, epoch
        self._made_in = epoch()
        self.current = current

    @property
    def is_outdated(self) -> bool:
        """True if another server may have taken over since the connection was made."""
        return self._made_in != self._epoch()

    def open(self) -> C:
        """Return the connection, opened on demand; raises :class:`StoreError` if the server stays unreachable."""
        if self.is_outdated or getattr(self.current, "closed", False):
            self.drop()
        if self.current is None:
            self._made_in = self._epoch()
            self.current = self._access.connect_in_time(self._stopping, limit_s=RESTART_WAIT_S)
        return self.current

    def drop(self) -> None:
        """Close the connection; the next :meth:`open` opens another one."""
        if self.current is not None:
            self.current.close()
            self.current = None


class UncheckedRead:
    """A read that is answered even while attempts are overdue."""

    def __init__(self, look: Look) -> None:
        self._look = look

    def __call__(self, reads: Reads) -> Any:
        """Return the answer of the read."""
        return self._look(reads)


class BatchReader(Generic[C]):
    """Runs batches of reads, on a separate connection for each calling thread.

    Args:
        connection: Makes the connection of a thread.
        read_all: Answers reads on a connection; the answer of a read that must wait for the writer is an
            :class:`OverdueError`.
    """

    def __init__(
        self,
        access: ServerAccess[C],
        *,
        connection: Callable[[], ThreadConnection[C]],
        read_all: Callable[[C, Sequence[Look]], list[Any]],
    ) -> None:
        self._access, self._connection, self._read_all = access, connection, read_all
        self._local = threading.local()
        self._connections: list[ThreadConnection[C]] = []

    def close(self) -> None:
        """Close the connections."""
        while self._connections:
            self._connections.pop().drop()

    def __call__(self, looks: Sequence[Look]) -> Sequence[Any]:
        """Return the answers; if the connection breaks, repeat the reads on a new one, for a limited time."""
        connection: ThreadConnection[C] | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._connection()
            self._connections.append(connection)
        end = time.monotonic() + RESTART_WAIT_S
        while True:
            db = connection.open()
            try:
                return self._read_all(db, looks)
            except BaseException as error:
                is_lost = self._access.is_lost(error, db)
                if is_lost or not self._access.is_usable(error, db):
                    connection.drop()
                if not is_lost or time.monotonic() > end:
                    raise


Message = tuple[bool, bool, float]
"""The message of a commit: whether rollouts were queued, whether the feed grew, and the earliest new deadline."""


def read_message(message: str) -> Message:
    """Parse the message of a commit."""
    flags, _, soonest = message.partition(" ")
    return "q" in flags, "f" in flags, float(soonest)


class Channel(Closable, Protocol):
    """A connection that receives the messages of commits."""

    @property
    def is_outdated(self) -> bool:
        """True once another server may have taken over."""
        ...

    def clock(self) -> tuple[float, float | None]:
        """Return the server's time and the next deadline, in Unix seconds."""
        ...

    def wait(self, limit_s: float) -> Iterable[Message]:
        """Return the messages that have come, after at most ``limit_s`` seconds or an interruption."""
        ...

    def interrupt(self) -> None:
        """End :meth:`wait`; called by another thread."""
        ...


class ChangeListener:
    """Wakes waiting callers and has overdue attempts decided in time. Its thread runs from the first wait to the close.

    Args:
        shown: Names the store in warnings.
        subscribe: Opens a channel that gets all later messages.
        wake_ups: The first is rung when rollouts were queued, the second when the change feed grew.
        expire: Submits the decision of overdue attempts; returns at once.
        stopping: Set when the store is closed.
    """

    def __init__(
        self,
        shown: str,
        *,
        subscribe: Callable[[], Channel],
        wake_ups: tuple[WakeUp, WakeUp],
        expire: Callable[[], object],
        stopping: threading.Event,
    ) -> None:
        self._shown, self._subscribe, self._expire, self._stopping = shown, subscribe, expire, stopping
        self._queued, self._changed = wake_ups
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._channel: Channel | None = None
        self._deadline, self._offset = math.inf, 0.0

    def start(self) -> None:
        """Start listening unless it has started; all waiting callers are woken once it listens."""
        with self._lock:
            if self._thread is None and not self._stopping.is_set():
                self._thread = threading.Thread(target=self._run, name="agl-store-watch", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Stop listening and wake all waiting callers. Blocks until the thread ends."""
        with self._lock:
            self._stopping.set()
            if self._channel is not None:
                self._channel.interrupt()
        if self._thread is not None:
            self._thread.join()
        self.wake_all()

    def wake_all(self) -> None:
        """Wake all waiting callers."""
        self._queued.ring()
        self._changed.ring()

    def _run(self) -> None:
        has_warned = False
        while not self._stopping.is_set():
            try:
                self._listen(self._subscribe())
            except Exception as error:  # isolation: waiting callers depend on this thread
                if not has_warned and not self._stopping.is_set():
                    reason = " ".join(f"{type(error).__name__}: {error}".split())
                    _logger.warning(
                        "waiting callers are not woken by changes in %s until it answers: %s", self._shown, reason
                    )
                    _logger.debug("the listener ended", exc_info=True)
                has_warned = True
                self._stopping.wait(_RETRY_S)
                self.wake_all()  # waiting callers find out by their own reads that the server is away

    def _listen(self, channel: Channel) -> None:
        with self._lock:
            self._channel = channel
        try:
            self._hear(channel)
        finally:
            with self._lock:
                self._channel = None
            channel.close()

    def _hear(self, channel: Channel) -> None:
        self._look(channel)
        self.wake_all()
        looked_at = time.monotonic()
        while not self._stopping.is_set() and not channel.is_outdated:
            now = time.monotonic()
            self._take(channel.wait(max(0.0, min(LOOK_S - (now - looked_at), self._deadline - now))))
            is_due = self._deadline <= time.monotonic()
            if is_due:
                self._expire()
            if is_due or time.monotonic() - looked_at >= LOOK_S:
                self._look(channel)
                looked_at = time.monotonic()
                if not is_due:
                    self._queued.ring()

    def _take(self, messages: Iterable[Message]) -> None:
        for has_queued, has_grown, soonest in messages:
            self._note(soonest)
            if has_queued:
                self._queued.ring()
            if has_grown:
                self._changed.ring()

    def _look(self, channel: Channel) -> None:
        """Read the server's clock and the next deadline, and remember both on this machine's clock."""
        now, deadline = channel.clock()
        self._offset = time.monotonic() - now
        self._deadline = math.inf
        if deadline is not None:
            self._note(max(deadline, now + _PAUSE_S))

    def _note(self, deadline: float) -> None:
        """Take note of a deadline, converted from the server's clock to this machine's monotonic one."""
        self._deadline = min(self._deadline, deadline + self._offset)


class ServerBackend:
    """Implements :class:`agl.stores.Backend` over a writer, a reader and a listener.

    Args:
        shown_url: The store's URL for messages.
        writer: The writes, which decide overdue attempts before any work.
        reader: The reads.
        subscribe: Opens a channel of the listener.
        closing: Closed in this order when the store is, after ``writer`` and ``reader``.
        stopping: Set when the store is closed; ends every wait for the server.
    """

    def __init__(
        self,
        shown_url: str,
        *,
        writer: Batches[Work[Any]],
        reader: Batches[Look],
        subscribe: Callable[[], Channel],
        closing: Sequence[Closable],
        stopping: threading.Event,
    ) -> None:
        self.shown_url, self._writer, self._reader, self._stopping = shown_url, writer, reader, stopping
        self._closing, self._pid = closing, os.getpid()
        self.queued, self.changed = WakeUp(on_wait=self._on_wait), WakeUp(on_wait=self._on_wait)
        wake_ups = (self.queued, self.changed)
        self.listener = ChangeListener(
            shown_url, subscribe=subscribe, wake_ups=wake_ups, expire=self._expire, stopping=stopping
        )

    async def write(self, work: Work[T]) -> T:
        self.check_process()
        return await self._writer.run(work, undo=work.undo)

    async def read(self, look: Callable[[Reads], T]) -> T:
        return await self.read_with(self._reader, look)

    async def read_with(self, reader: Batches[Look], look: Callable[[Reads], T]) -> T:
        """Run a read on ``reader``; if attempts are overdue, the writer decides them first."""
        self.check_process()
        try:
            return await reader.run(look)
        except OverdueError:
            await self._writer.run(Work(act=_do_nothing))
        return await reader.run(UncheckedRead(look))  # another machine may be deciding them just now

    @property
    def is_of_this_process(self) -> bool:
        """False in a process that inherited the store by a fork."""
        return os.getpid() == self._pid

    async def close(self) -> None:
        if self.is_of_this_process:
            await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._stopping.set()
        for each in (self._writer, self._reader, *self._closing, self.listener):
            each.close()

    def check_process(self) -> None:
        """Raise :class:`StoreError` in a process that inherited the store by a fork."""
        if not self.is_of_this_process:
            raise StoreError(
                f"the store {self.shown_url} was opened in another process; open it again in this one: its connections "
                "and threads do not survive a fork"
            )

    def _on_wait(self) -> float:
        self.listener.start()
        return math.inf

    def _expire(self) -> None:
        self._writer.submit(Work(act=_do_nothing))


def _do_nothing(_: Tables) -> None:
    """Do nothing; the transaction around it still decides overdue attempts."""
