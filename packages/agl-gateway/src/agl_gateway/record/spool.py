"""Keeps calls that the store has not taken yet in a file, and writes them to the store in batches.

A call in the spool may be acknowledged, because it survives the end of the process and any outage of the store. One
task drains the file, oldest calls first. Spans that the store refuses for good are set aside in the file with the
reason; all others are retried until they are stored.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from shutil import disk_usage
from typing import TypeVar

from agl.contracts import Store
from agl.errors import StoreError
from agl.schemas import Blob
from agl_gateway.record.outage import FINAL, Outage
from agl_gateway.record.spool_file import SpooledCall, SpoolFile
from agl_gateway.wire.problems import Problem

T = TypeVar("T")

_log = logging.getLogger(__name__)

WARN_CALLS = 5_000
MAX_CALLS = 50_000
MAX_BYTES = 256 << 20

_BATCH = 512
_BATCH_BYTES = 8 << 20
_PART_BYTES = 8 << 20
_DELAYS_S = (0.05, 0.2, 0.5, 1.0)
"""Pauses between attempts while the store does not answer; the last pause is repeated."""

_TRIES = 5
"""Failed writes after which waiting callers get an error; the calls stay in the spool and are still retried."""

_DEFER_S = 0.25
_MAX_DOUBLINGS = 7
"""How often the pause after a refusal doubles: from 0.5 s up to about half a minute."""

_MIN_FREE_BYTES = 64 << 20
_FREE_FOR_S = 1.0
_RETRY_AFTER_S = 5


@dataclass(eq=False)
class SpanCount:
    """The number of spans that one gateway has written to its store."""

    total: int = 0


@dataclass(eq=False)
class Spool:
    """Calls on their way to the store. Used in one event loop only.

    Attributes:
        file: The gateway's own file.
        leftovers: Files of gateways that are gone; they are drained, and closed by :meth:`stop`.
        on_stored: Called with the attempt ids of calls that are in the store, or will never be.
        on_failure: Called with the attempt, the error message, and the number of spans that the store refused for good.
        max_calls: Number of calls in the spool at which new calls are refused.
        max_bytes: Bytes in the spool at which new calls are refused.
    """

    file: SpoolFile
    _: KW_ONLY
    store: Store
    outage: Outage
    stored: SpanCount
    on_stored: Callable[[Sequence[str]], Awaitable[None]]
    on_failure: Callable[[str, str, int], None]
    leftovers: Sequence[SpoolFile] = ()
    max_calls: int = MAX_CALLS
    max_bytes: int = MAX_BYTES

    def __post_init__(self) -> None:
        self._files = [self.file, *self.leftovers]
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="agl-spool")
        self._work = asyncio.Event()
        self._under_way: asyncio.Task[bool] | None = None
        self._brought: list[SpooledCall] = []
        self._tries: Counter[str] = Counter()
        self._deferred: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._fault = ""
        self._free = (0.0, 0)
        self._oldest_at = 0.0
        self._has_warned = False
        self.calls = 0
        self.size = 0

    @property
    def gateway_id(self) -> str:
        """The gateway's id, the same at every start with this spool file."""
        return self.file.gateway_id

    @property
    def is_empty(self) -> bool:
        """True if no call is in the spool, so that new calls may go to the store directly."""
        return not self.calls

    @property
    def age_s(self) -> float:
        """Seconds since the oldest call in the spool was written; 0 for an empty spool."""
        return max(0.0, time.time() - self._oldest_at) if self.calls else 0.0

    def start(self) -> Counter[str]:
        """Start a task that drains the files; returns how many calls of each attempt they hold."""
        found: Counter[str] = Counter()
        for file in self._files:
            content = file.content()
            found.update(content.attempts)
            self.calls += content.calls
            self.size += content.size
            if content.calls:
                self._oldest_at = min(self._oldest_at or content.oldest_at, content.oldest_at)
                _log.warning("%d calls of an earlier start wait in %s and are stored now", content.calls, file.path)
        self._work.set()
        self._task = asyncio.create_task(self._run())
        return found

    async def stop(self, *, limit_s: float) -> int:
        """Drain for up to ``limit_s`` seconds, and close the files; returns how many calls are left in them.

        Idempotent.
        """
        self._is_stopping = True
        self._work.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=limit_s)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        files, self._files = self._files, []
        for file in files:
            await self._do(file.close)
        if files:
            self._thread.shutdown()
        return self.calls

    def check_room(self) -> None:
        """Raise a :class:`Problem` if no call can be added: 429 for a full spool, 503 if its disk fails or is full."""
        if self.is_empty and not self.outage.is_on:
            return
        if self.calls >= self.max_calls or self.size >= self.max_bytes:
            raise Problem(
                429,
                f"{self.calls} calls ({self.size >> 20} MiB) wait for the gateway's store, which does not answer or "
                "is too slow; the model was not asked. Try again later, and see to the store",
                code="store_behind",
                is_retryable=True,
                retry_after_s=_RETRY_AFTER_S,
            )
        fault = self._fault or self._disk_fault()
        if fault:
            raise Problem(
                503,
                f"the gateway's store does not answer, and {fault}; the model was not asked",
                code="spool_failed",
                is_retryable=True,
                retry_after_s=_RETRY_AFTER_S,
            )

    async def put(self, calls: Sequence[SpooledCall], *, under_way: "asyncio.Task[bool] | None" = None) -> None:
        """Write calls to the spool's file.

        Args:
            under_way: A slow write of the same calls to the store, if one is running; its result is true if they were
                stored.

        Raises:
            StoreError: The file cannot be written.
        """
        try:
            added = await self._do(lambda: self.file.add(calls))
        except StoreError as error:
            if not self._fault:
                _log.error("%s", error)
            self._fault = str(error)
            raise
        self._fault = ""
        if self.is_empty:
            self._oldest_at = time.time()
        self.calls += len(added)
        self.size += sum(call.size for call in added)
        if under_way is not None:
            self._under_way, self._brought = under_way, added
        self._warn()
        self._work.set()

    async def _run(self) -> None:
        while True:
            if self.outage.is_on:
                await self._wait_for_store()
            if self._under_way is not None:
                await self._follow(self._under_way)
            if self.is_empty:
                if self._is_stopping:
                    return
                await self._wait_for_work()
                continue
            try:
                await self._drain_some()
            except StoreError:  # the spool's own disk; the store takes repeated spans once
                _log.exception("the spool could not be drained; trying again")
                await asyncio.sleep(_DELAYS_S[-1])

    async def _wait_for_work(self) -> None:
        """Wait until calls are added or the store stops answering; free disk space first."""
        await self._do(self.file.shrink)
        self._work.clear()
        waits = [asyncio.ensure_future(self._work.wait()), asyncio.ensure_future(self.outage.begun.wait())]
        try:
            if self.is_empty and not self._is_stopping:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _wait_for_store(self) -> None:
        delays = iter(_DELAYS_S)
        while not await self.outage.is_over():
            await asyncio.sleep(next(delays, _DELAYS_S[-1]))

    async def _follow(self, under_way: "asyncio.Task[bool]") -> None:
        """Wait for a slow write to the store; if it succeeds, remove the written calls from the spool."""
        is_stored = await asyncio.shield(under_way)
        calls, self._under_way, self._brought = self._brought, None, []
        if is_stored:
            await self._remove(self.file, calls)

    async def _drain_some(self) -> None:
        """Write a batch of the oldest calls to the store, from the first file that holds any."""
        now = time.monotonic()
        waiting = [attempt_id for attempt_id, until in self._deferred.items() if until > now]
        for file in self._files:
            calls = await self._do(lambda file=file: file.oldest(limit=_BATCH, max_bytes=_BATCH_BYTES, without=waiting))
            if calls:
                self._oldest_at = calls[0].at
                await self._bring(file, calls)
                return
        if waiting:
            await asyncio.sleep(max(0.01, min(self._deferred[attempt_id] for attempt_id in waiting) - now))

    async def _bring(self, file: SpoolFile, calls: Sequence[SpooledCall]) -> None:
        """Write a batch to the store; if the store refuses it, write each attempt's calls separately."""
        if await self._append(calls) is None:
            self.outage.end()
            await self._remove(file, calls)
            return
        if not await self.outage.is_over():
            return
        for attempt_id in dict.fromkeys(call.attempt_id for call in calls):
            own = [call for call in calls if call.attempt_id == attempt_id]
            error = await self._append(own)
            if error is None:
                await self._remove(file, own)
            elif not isinstance(error, FINAL) and not await self.outage.is_over():
                return
            else:
                await self._defer_or_refuse(file, own, error)

    async def _append(self, calls: Sequence[SpooledCall]) -> Exception | None:
        return await appended(self.store, calls, self.stored)

    async def _defer_or_refuse(self, file: SpoolFile, calls: Sequence[SpooledCall], error: Exception) -> None:
        """Schedule another try for an attempt's calls, or set them aside if the store refused them for good."""
        attempt_id = calls[0].attempt_id
        message = message_of(error)
        spans = sum(len(call.spans) for call in calls)
        if isinstance(error, FINAL):
            _log.error("the store refused %d spans of attempt %s: %s", spans, attempt_id, message)
            await self._do(lambda: file.refuse(calls, message))
            self.on_failure(attempt_id, message, spans)
            await self._count_down(calls)
            return
        self._tries[attempt_id] += 1
        self._deferred[attempt_id] = time.monotonic() + _DEFER_S * 2 ** min(self._tries[attempt_id], _MAX_DOUBLINGS)
        if self._tries[attempt_id] == _TRIES:
            _log.error("%d spans of attempt %s stay in the spool: %s", spans, attempt_id, message)
            self.on_failure(attempt_id, message, 0)
            await self.on_stored([])

    async def _remove(self, file: SpoolFile, calls: Sequence[SpooledCall]) -> None:
        await self._do(lambda: file.remove(calls))
        await self._count_down(calls)

    async def _count_down(self, calls: Sequence[SpooledCall]) -> None:
        self.calls -= len(calls)
        self.size -= sum(call.size for call in calls)
        if self.calls < WARN_CALLS // 2:
            self._has_warned = False
        attempts = [call.attempt_id for call in calls]
        for attempt_id in set(attempts):
            self._tries.pop(attempt_id, None)
            self._deferred.pop(attempt_id, None)
        await self.on_stored(attempts)

    def _warn(self) -> None:
        if self.calls >= WARN_CALLS and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%d calls wait for the store, the oldest for %.0f s; at %d further calls are refused",
                self.calls,
                self.age_s,
                self.max_calls,
            )

    def _disk_fault(self) -> str:
        """Return an error message if the disk is nearly full, else ``""``; the disk is checked once a second."""
        looked_at, free = self._free
        if time.monotonic() - looked_at > _FREE_FOR_S:
            free = disk_usage(self.file.path.parent).free
            self._free = (time.monotonic(), free)
        if free >= _MIN_FREE_BYTES:
            return ""
        return (
            f"the disk of its spool {self.file.path} has {free >> 20} MiB left, which is less than "
            f"{_MIN_FREE_BYTES >> 20}; make room there"
        )

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


async def appended(store: Store, calls: Sequence[SpooledCall], stored: SpanCount) -> Exception | None:
    """Write calls to the store, media first, and count their spans; returns the error if that fails, else ``None``."""
    spans = [span for call in calls for span in call.spans]
    try:
        for blobs in _parts([blob for call in calls for blob in call.blobs]):
            await store.save_blobs(blobs)
        await store.append_spans(spans)
    except Exception as error:  # noqa: BLE001  # isolation: repeated, or reported by the caller
        return error
    stored.total += len(spans)
    return None


def _parts(blobs: Sequence[Blob]) -> Iterator[list[Blob]]:
    """Divide payloads into parts of limited size, because one request of a store has to hold each."""
    part, size = list[Blob](), 0
    for blob in {blob.digest: blob for blob in blobs}.values():
        if part and size + len(blob.data) > _PART_BYTES:
            yield part
            part, size = [], 0
        part.append(blob)
        size += len(blob.data)
    if part:
        yield part


def message_of(error: Exception) -> str:
    """Return the text of a failed write for logs and callers."""
    return str(error) if isinstance(error, StoreError) else repr(error)
