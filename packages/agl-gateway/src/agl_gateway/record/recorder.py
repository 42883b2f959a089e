"""Turns finished exchanges into spans in the store, off the reply path, with a bounded queue and one worker.

Calls are admitted only while the queue has room, so a slow store slows calls down instead of filling the memory. The
worker yields to the event loop after parsing each exchange, so replies are not delayed. If the store refuses a batch,
the spans of each attempt are written in a separate task, so one attempt's failure delays no other attempt.

With a spool, a call is acknowledged once it is durable: in the store, or in the spool if the store does not take the
call at once. Without a spool, calls are in memory until the store has them.
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field, replace

from agl.contracts import Store
from agl.errors import CaptureError, StoreError
from agl.schemas import Blob
from agl_gateway.record.exchanges import CallRecord, spans_of
from agl_gateway.record.media import WrittenMedia
from agl_gateway.record.outage import FINAL, Outage
from agl_gateway.record.redaction import Redaction, with_digests
from agl_gateway.record.spool import SpanCount, Spool, appended, message_of
from agl_gateway.record.spool_file import SpooledCall, SpoolFile
from agl_gateway.record.storable import storable

_log = logging.getLogger(__name__)

_MAX_QUEUED = 2048
_MAX_BYTES = 64 * 1024 * 1024
_BATCH = 64
_LARGE = 256 * 1024
"""Bytes from which a call is parsed in a thread, so that the event loop serves other requests meanwhile."""

_MAX_FAILURES = 10_000
_STREAM_GRACE_S = 2.0
_LINGER_S = 0.005
_SPOOL_RETRY_S = 0.5
_RETRY_DELAYS_S = (0.05, 0.2, 1.0, 3.0)
"""Pauses before a gateway without a spool retries to write an attempt's calls; after the last retry they are lost."""

_STOP_TRIES = 10
"""The number of times that a stopping gateway tries to write calls to the spool or the store."""

_SPOOL_STOP_S = 5.0
"""Seconds in which a stopping gateway moves calls from the spool to the store; the rest stay in the spool."""


@dataclass(eq=False)
class Recorder:
    """Writes the recorded calls of the gateway to the store. Used in one event loop only.

    Attributes:
        spools: The gateway's own spool, then the spools of gateways that are gone; empty to run without a spool.
        spool_after_s: Seconds that the store may take for a batch before its calls go to the spool.
        on_held: Called at every change with the number of open streams plus the number of calls that are not in the
            store.
        redaction: Redacts the calls.
        stored: Counts the spans that any part of the gateway writes to the store.
        lost: The number of spans that could not be written.
        spool: Calls that are durable but not in the store; ``None`` without a spool.
    """

    store: Store
    _: KW_ONLY
    outage: Outage
    spools: Sequence[SpoolFile] = ()
    spool_after_s: float = 0.05
    on_held: Callable[[int], None] | None = None
    redaction: Redaction = field(default_factory=Redaction)

    def __post_init__(self) -> None:
        self._held = 0
        self._media = WrittenMedia(self.redaction)
        self.stored = SpanCount()
        self._retries: dict[str, asyncio.Task[None]] = {}
        self._queue: deque[CallRecord] = deque()
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
        self._unwritten: dict[int, tuple[float, asyncio.Future[None]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False
        self.lost = 0
        self.spool: Spool | None = None
        if self.spools:
            self.spool = Spool(
                self.spools[0],
                leftovers=self.spools[1:],
                store=self.store,
                outage=self.outage,
                stored=self.stored,
                on_stored=self._stored,
                on_failure=self._fail,
            )

    @property
    def pending(self) -> int:
        """The number of calls that are in memory or in the spool but not in the store."""
        return self._pending.total()

    @property
    def pending_bytes(self) -> int:
        """Bytes of the calls that are not in the store."""
        return self._bytes + (self.spool.size if self.spool else 0)

    @property
    def pending_s(self) -> float:
        """The age, in seconds, of the oldest call that is not in the store."""
        oldest = next(iter(self._unwritten.values()), None)
        in_memory = time.monotonic() - oldest[0] if oldest else 0.0
        return max(in_memory, self.spool.age_s if self.spool else 0.0)

    @property
    def queued(self) -> int:
        """The number of exchanges in the queue that are not parsed yet."""
        return len(self._queue)

    @property
    def queued_bytes(self) -> int:
        """Bytes of the exchanges that are in memory only."""
        return self._bytes

    def start(self) -> None:
        """Start the task that writes calls to the store, and the task that drains the spool."""
        if self.spool is not None:
            self._pending.update(self.spool.start())
        self._hold(self._pending.total())
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> int:
        """Write the queued exchanges, then end the task; returns how many calls are left in the spool. Idempotent."""
        self._flush_now.set()
        self._is_stopping = True
        self._work.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
            await asyncio.gather(*self._retries.values(), return_exceptions=True)
            self._task = None
        return 0 if self.spool is None else await self.spool.stop(limit_s=_SPOOL_STOP_S)

    async def admit(self) -> None:
        """Wait until the queue has room for one more exchange.

        Raises:
            Problem: 429 if the spool is full, 503 if the spool is needed and its disk is full.
        """
        if self.spool is not None:
            self.spool.check_room()
        await self._room.wait()

    def put(self, recorded: CallRecord) -> int:
        """Queue an exchange without blocking; returns its number, for :meth:`durable` and :meth:`written`."""
        self._put += 1
        recorded.number = self._put
        self._pending[recorded.attempt_id] += 1
        self._hold(1)
        self._unwritten[self._put] = (time.monotonic(), asyncio.get_running_loop().create_future())
        self._queue.append(recorded)
        self._bytes += recorded.size
        if len(self._unwritten) >= _MAX_QUEUED or self._bytes >= _MAX_BYTES:
            self._room.clear()
        self._work.set()
        return self._put

    async def durable(self, number: int) -> None:
        """Return once the exchange ``number`` is in the store or in the spool, or is lost."""
        if number in self._unwritten:
            await asyncio.shield(self._unwritten[number][1])

    async def written(self, number: int, attempt_id: str) -> None:
        """Return once the attempt's exchange ``number`` is in the store or in the spool.

        Raises:
            CaptureError: The store refused this exchange, or another one of the attempt.
        """
        with self._flushing():
            await self.durable(number)
        self._raise_failure(attempt_id)

    def stream_opened(self, attempt_id: str) -> None:
        """Record the start of a streamed answer, so that :meth:`settle` waits for the end of the stream."""
        self._open_streams[attempt_id] += 1
        self._hold(1)

    async def stream_closed(self, attempt_id: str) -> None:
        """Record the end of a streamed answer; call this after the exchange was queued."""
        self._hold(-1)
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
        """While the block runs, write batches without waiting for more calls."""
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
            await self._changed.wait_for(
                lambda: attempt_id not in self._pending or (self.spool is not None and attempt_id in self._failures)
            )

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
        """Wait up to 5 ms for more calls, because each write has a fixed cost; return at once if a caller waits."""
        if len(self._queue) < _BATCH and not self._flush_now.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(_LINGER_S):
                    await self._flush_now.wait()

    async def _write_batch(self) -> None:
        batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
        parsed: list[tuple[CallRecord, SpooledCall]] = []
        for queued in batch:
            parsed.append((queued, await self._parse(queued)))
            queued.exchange, queued.parts = None, ()  # the spans have their content
            await asyncio.sleep(0)
        if self.spool is not None:
            await self._keep(self.spool, parsed)
        else:
            await self._write(parsed)

    async def _write(self, parsed: Sequence[tuple[CallRecord, SpooledCall]]) -> None:
        """Write a batch to the store; if the store refuses it, write the spans of each attempt separately."""
        calls: defaultdict[str, list[SpooledCall]] = defaultdict(list)
        for queued, own in parsed:
            calls[queued.attempt_id].append(own)
        at_once = [attempt_id for attempt_id in calls if attempt_id not in self._retries]
        is_written = await self._append([call for attempt_id in at_once for call in calls[attempt_id]]) is None
        done = set(at_once) if is_written else set[str]()
        await self._finish([queued for queued, _ in parsed if queued.attempt_id in done])
        for attempt_id in calls.keys() - done:
            batch = [queued for queued, _ in parsed if queued.attempt_id == attempt_id]
            before = self._retries.get(attempt_id)
            retry = self._retry(attempt_id, calls[attempt_id], batch, before=before)
            self._retries[attempt_id] = asyncio.create_task(retry)

    async def _retry(
        self,
        attempt_id: str,
        calls: Sequence[SpooledCall],
        batch: Sequence[CallRecord],
        *,
        before: asyncio.Task[None] | None,
    ) -> None:
        """Write an attempt's spans after the task ``before`` has ended; retry until they are stored or given up."""
        try:
            if before is not None:
                await asyncio.wait([before])
            fitted, error = [replace(call, spans=[storable(span) for span in call.spans]) for call in calls], None
            for delay_s in (0.0, *_RETRY_DELAYS_S):
                await asyncio.sleep(delay_s)
                error = await self._append(fitted)
                if error is None or isinstance(error, FINAL):
                    break
            if error is not None:
                count = sum(len(call.spans) for call in calls)
                _log.error("the store refused %d spans of attempt %s: %s", count, attempt_id, message_of(error))
                self._fail(attempt_id, message_of(error), count)
            await self._finish(batch)
        finally:
            if self._retries.get(attempt_id) is asyncio.current_task():
                del self._retries[attempt_id]

    async def _keep(self, spool: Spool, parsed: Sequence[tuple[CallRecord, SpooledCall]]) -> None:
        """Write a batch to the store, or to the spool if earlier calls wait there or the store takes too long."""
        batch = [queued for queued, _ in parsed]
        calls = [call for _, call in parsed if call.spans]
        append: asyncio.Task[bool] | None = None
        tries = 0
        while True:
            if append is None and spool.is_empty and not self.outage.is_on:
                append = asyncio.create_task(self._is_appended(calls))
            if append is not None:
                await asyncio.wait([append], timeout=self.spool_after_s)
            if append is not None and append.done():
                if append.result():
                    await self._finish(batch)
                    return
                append = None
            is_first = spool.is_empty
            try:
                await spool.put(calls, under_way=append)
            except StoreError as error:  # neither takes them: their clients wait for their answers
                tries += self._is_stopping
                if tries > _STOP_TRIES:
                    _log.error("%d calls are lost: neither the store nor the spool takes them", len(calls))
                    for call in calls:
                        self._fail(call.attempt_id, str(error), len(call.spans))
                    await self._finish(batch)
                    return
                await asyncio.sleep(_SPOOL_RETRY_S)
            else:
                self._media.add((blob for call in calls for blob in call.blobs), anew=is_first)
                self._acknowledge(batch)
                await self._stored([queued.attempt_id for queued, call in parsed if not call.spans])
                return

    async def _is_appended(self, calls: Sequence[SpooledCall]) -> bool:
        return await self._append(calls) is None

    async def _append(self, calls: Sequence[SpooledCall]) -> Exception | None:
        """Write the calls of several attempts in one request; returns the error if the store refuses the request."""
        written = [call for call in calls if call.spans]
        error = await appended(self.store, written, self.stored) if written else None
        if error is None:
            self._media.add(blob for call in calls for blob in call.blobs)
        return error

    async def _finish(self, batch: Sequence[CallRecord]) -> None:
        """Record that these exchanges are in the store or lost, and wake the callers that wait for them."""
        self._acknowledge(batch)
        await self._stored([queued.attempt_id for queued in batch])

    def _acknowledge(self, batch: Sequence[CallRecord]) -> None:
        """Free the room that these exchanges took in the queue, and wake the callers of :meth:`durable`."""
        self._bytes -= sum(queued.size for queued in batch)
        for queued in batch:
            self._unwritten.pop(queued.number)[1].set_result(None)
        if len(self._unwritten) < _MAX_QUEUED and self._bytes < _MAX_BYTES:
            self._room.set()

    async def _stored(self, attempt_ids: Iterable[str]) -> None:
        """Count one call of each listed attempt as stored, and wake the callers that wait for an attempt."""
        async with self._changed:
            for attempt_id in attempt_ids:
                self._hold(-1)
                self._pending[attempt_id] -= 1
                if self._pending[attempt_id] <= 0:
                    del self._pending[attempt_id]
            self._changed.notify_all()

    def _hold(self, change: int) -> None:
        self._held += change
        if self.on_held is not None:
            self.on_held(self._held)

    async def _parse(self, recorded: CallRecord) -> SpooledCall:
        attempt_id, blobs = recorded.attempt_id, list[Blob]()
        try:
            is_large = recorded.size > _LARGE
            spans = await asyncio.to_thread(spans_of, recorded) if is_large else spans_of(recorded)
            if media := recorded.outgoing.request.stored().blobs:
                changed, blobs = await self._media.prepared(media)
                spans = [with_digests(span, changed) for span in spans]
            return SpooledCall(attempt_id=attempt_id, spans=await self.redaction.of(spans), blobs=blobs)
        except Exception as error:  # noqa: BLE001  # isolation: one unforeseen body must not end all recording
            _log.exception("a model call of attempt %s could not be read", attempt_id)
            self._fail(attempt_id, repr(error), 1)
            return SpooledCall(attempt_id=attempt_id, spans=())

    def _fail(self, attempt_id: str, message: str, count: int) -> None:
        self._failures[attempt_id] = message
        if len(self._failures) > _MAX_FAILURES:
            del self._failures[next(iter(self._failures))]
        self.lost += count
