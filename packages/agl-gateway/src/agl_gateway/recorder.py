"""Turns finished exchanges into spans in the store, off the reply path, with a bounded queue and one worker.

Calls are admitted only while the queue has room, so a slow store slows calls down instead of filling the memory.
Parsing yields to the event loop after every exchange, so replies do not wait for it. A batch that the store refuses is
written attempt by attempt, each in a task of its own, so that no attempt's trouble delays another's calls.
"""

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from agl.contracts import Store
from agl.errors import CaptureError
from agl.schemas import Span
from agl_gateway.attempt_writer import AttemptWriter
from agl_gateway.exchanges import RecordedExchange, spans_of
from agl_gateway.metrics import SpanRate

_log = logging.getLogger(__name__)

_MAX_QUEUED = 2048
_MAX_BYTES = 64 * 1024 * 1024
_BATCH = 64
_MAX_FAILURES = 10_000
_STREAM_GRACE_S = 2.0
_LINGER_S = 0.005


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Queued:
    """An exchange with its number."""

    number: int
    recorded: RecordedExchange

    @property
    def attempt_id(self) -> str:
        return self.recorded.context.attempt_id


class Recorder:
    """Writes the recorded calls of the gateway to the store. Used in one event loop only.

    Attributes:
        lost: Number of spans that could not be written.
    """

    def __init__(self, store: Store, *, rate: SpanRate) -> None:
        self._store = store
        self._rate = rate
        self._writer = AttemptWriter(store, rate=rate, on_failure=self._fail)
        self._queue: deque[_Queued] = deque()
        self._bytes = 0
        self._pending: Counter[str] = Counter()
        self._open_streams: Counter[str] = Counter()
        self._failures: dict[str, str] = {}
        self._changed = asyncio.Condition()
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._flush_now = asyncio.Event()
        self._waiters = 0
        self._put = 0
        self._unwritten: set[int] = set()
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False
        self.lost = 0

    @property
    def queued(self) -> int:
        """Number of exchanges that wait to be parsed."""
        return len(self._queue)

    @property
    def queued_bytes(self) -> int:
        """Bytes of the exchanges that are not written yet."""
        return self._bytes

    def start(self) -> None:
        """Start the worker."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Write the queued exchanges, then end the worker; idempotent."""
        self._flush_now.set()
        self._is_stopping = True
        self._work.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
            await self._writer.stop()
            self._task = None

    async def admit(self) -> None:
        """Wait until the queue has room for one more exchange."""
        await self._room.wait()

    def put(self, recorded: RecordedExchange) -> int:
        """Queue an exchange; never blocks. Returns its number, for :meth:`written`."""
        self._put += 1
        self._pending[recorded.context.attempt_id] += 1
        self._unwritten.add(self._put)
        self._queue.append(_Queued(number=self._put, recorded=recorded))
        self._bytes += recorded.size
        if len(self._unwritten) >= _MAX_QUEUED or self._bytes >= _MAX_BYTES:
            self._room.clear()
        self._work.set()
        return self._put

    async def written(self, number: int, attempt_id: str) -> None:
        """Return once the attempt's exchange of that number is in the store.

        Raises:
            CaptureError: The store refused it, or another exchange of the attempt.
        """
        with self._flushing():
            async with self._changed:
                await self._changed.wait_for(lambda: number not in self._unwritten)
        self._raise_failure(attempt_id)

    def stream_opened(self, attempt_id: str) -> None:
        """Record the start of a streamed answer, whose end :meth:`settle` then awaits."""
        self._open_streams[attempt_id] += 1

    async def stream_closed(self, attempt_id: str) -> None:
        """Record the end of a streamed answer, after it was queued."""
        self._open_streams[attempt_id] -= 1
        if self._open_streams[attempt_id] <= 0:
            del self._open_streams[attempt_id]
            async with self._changed:
                self._changed.notify_all()

    async def settle(self, attempt_id: str) -> None:
        """Return once every answered call of the attempt is in the store.

        Open streams get two seconds to end, because their client may have read the last event already.

        Raises:
            CaptureError: The store refused some of the calls.
        """
        with self._flushing():
            await self._wait_written(attempt_id)
        self._raise_failure(attempt_id)

    @contextmanager
    def _flushing(self) -> Generator[None]:
        """Write batches at once while a caller waits for them."""
        self._waiters += 1
        self._flush_now.set()
        try:
            yield
        finally:
            self._waiters -= 1
            if not self._waiters and not self._is_stopping:
                self._flush_now.clear()

    def _raise_failure(self, attempt_id: str) -> None:
        failure = self._failures.pop(attempt_id, "")
        if failure:
            raise CaptureError(
                f"model calls of attempt {attempt_id!r} are not in the store: {failure}. "
                "Check the store's disk and connection, then run the rollout again"
            )

    async def _wait_written(self, attempt_id: str) -> None:
        async with self._changed:
            if attempt_id in self._open_streams:
                try:
                    async with asyncio.timeout(_STREAM_GRACE_S):
                        await self._changed.wait_for(lambda: attempt_id not in self._open_streams)
                except TimeoutError:
                    _log.warning("attempt %s ends while one of its streams is still open", attempt_id)
            await self._changed.wait_for(lambda: attempt_id not in self._pending)

    async def _run(self) -> None:
        while True:
            if not self._queue:
                if self._is_stopping:
                    return
                self._work.clear()
                await self._work.wait()
                continue
            await self._linger()
            await self._write_batch()

    async def _linger(self) -> None:
        """Let a batch grow for a moment, because each write has a fixed cost; skipped while a caller waits."""
        if len(self._queue) < _BATCH and not self._flush_now.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(_LINGER_S):
                    await self._flush_now.wait()

    async def _write_batch(self) -> None:
        batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
        spans: defaultdict[str, list[Span]] = defaultdict(list)
        for queued in batch:
            spans[queued.attempt_id] += self._parse(queued.recorded)
            await asyncio.sleep(0)
        at_once = [attempt_id for attempt_id in spans if not self._writer.is_behind(attempt_id)]
        is_written = await self._append([span for attempt_id in at_once for span in spans[attempt_id]])
        done = set(at_once) if is_written else set[str]()
        await self._finish([queued for queued in batch if queued.attempt_id in done])
        for attempt_id in spans.keys() - done:
            own = [queued for queued in batch if queued.attempt_id == attempt_id]
            self._writer.write(attempt_id, spans[attempt_id], then=partial(self._finish, own))

    async def _append(self, spans: list[Span]) -> bool:
        """Write spans of several attempts at once; returns false if the store refuses."""
        try:
            if spans:
                await self._store.append_spans(spans)
                self._rate.add(len(spans))
        except Exception:  # noqa: BLE001  # isolation: repeated and reported for each attempt
            return False
        return True

    async def _finish(self, batch: Sequence[_Queued]) -> None:
        """Make room for further exchanges, and wake the callers that wait for these."""
        self._bytes -= sum(queued.recorded.size for queued in batch)
        self._unwritten.difference_update(queued.number for queued in batch)
        if len(self._unwritten) < _MAX_QUEUED and self._bytes < _MAX_BYTES:
            self._room.set()
        async with self._changed:
            for queued in batch:
                self._count_down(queued.attempt_id)
            self._changed.notify_all()

    def _count_down(self, attempt_id: str) -> None:
        self._pending[attempt_id] -= 1
        if self._pending[attempt_id] <= 0:
            del self._pending[attempt_id]

    def _parse(self, recorded: RecordedExchange) -> list[Span]:
        try:
            return spans_of(recorded)
        except Exception as error:  # noqa: BLE001  # isolation: one unforeseen body must not end all recording
            _log.exception("a model call of attempt %s could not be read", recorded.context.attempt_id)
            self._fail(recorded.context.attempt_id, repr(error), 1)
            return []

    def _fail(self, attempt_id: str, message: str, count: int) -> None:
        self._failures[attempt_id] = message
        if len(self._failures) > _MAX_FAILURES:
            del self._failures[next(iter(self._failures))]
        self.lost += count
