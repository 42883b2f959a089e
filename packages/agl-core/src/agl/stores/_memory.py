"""``memory://``: the store for tests, notebooks and dry runs; its contents are gone when the process ends.

It follows the same rules as the durable stores. Spans are compressed: a call of 1,200 tokens takes less than 8 KB.
Unlike the durable stores, this one keeps every prompt whole instead of sharing a conversation's common prefix, so use a
file for long conversations. The tables are dicts and sorted lists, so that no operation scans the whole store. One lock
guards the tables; no operation holds it while it waits.
"""

import heapq
import math
import sys
import threading
import time
import zlib
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from msgspec.structs import replace

from agl.contracts import Change, Metric, RolloutQuery, Statistics
from agl.errors import StoreError
from agl.schemas import Attempt, Claim, ResourceVersion, Rollout, Span
from agl.schemas import _codec as codec
from agl.schemas._ids import attempt_id_of, rollout_id_of
from agl.stores import _queries as queries
from agl.stores import _values as values
from agl.stores._leases import deadline
from agl.stores._operations import closed, expire, need_held, need_rollout, unknown_attempt
from agl.stores._store import TableStore, Work
from agl.stores._tallies import place_of
from agl.stores._wake_up import WakeUp

T = TypeVar("T")
N = TypeVar("N", bound=Hashable)

_Rest: TypeAlias = tuple[Any, Any, int, bytes, bytes]

# Below this size zlib costs more than it saves; level 0 stores such data in the same format.
MIN_DEFLATED = 512


class _Lists(Generic[N]):
    """Sorted lists by name; an id is in at most one of them."""

    def __init__(self) -> None:
        self.lists: dict[N, list[Any]] = {}
        self._places: dict[str, tuple[N, Any]] = {}

    def put(self, of: str, entry: Any, name: N | None) -> None:
        """Move the id ``of`` to the list called ``name``, sorted as ``entry``; ``None`` removes it from all lists."""
        before = self._places.pop(of, None)
        if before is not None:
            entries = self.lists[before[0]]
            del entries[bisect_left(entries, before[1])]
            if not entries:
                del self.lists[before[0]]
        if name is not None:
            insort(self.lists.setdefault(name, []), entry)
            self._places[of] = name, entry


class _Spans:
    """The spans of one attempt, by sequence, each packed by :func:`_pack`."""

    def __init__(self) -> None:
        self.sequences: list[int] = []
        self.packed: list[bytes] = []
        self.ids: set[str] = set()


class MemoryTables:
    """Implements :class:`agl.stores.Tables` and :class:`agl.stores.Reads`, for one thread at a time.

    Equal writes in equal order make equal tables, in every process.

    Attributes:
        now: Unix seconds; the caller sets it for every transaction.
        has_queued: Whether rollouts were queued since the caller last reset it.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.has_queued = False
        self._rollouts: dict[str, bytes] = {}
        self._order: dict[str, int] = {}
        # Never reused: rollouts keep their first place in the queue, even after a retry.
        self._added = 0
        self._listed: _Lists[tuple[str, str, str]] = _Lists()
        self._grouped: _Lists[str] = _Lists()
        self._queue: _Lists[str] = _Lists()
        self._attempts: dict[str, Attempt] = {}
        self._due: _Lists[str] = _Lists()
        self._claims: _Lists[str] = _Lists()
        self._spans: dict[tuple[str, str], _Spans] = {}
        self._cursor = 0
        self._cursors: list[int] = []
        self._changes: dict[int, Change] = {}
        self._changes_of: defaultdict[str, list[int]] = defaultdict(list)
        self._versions: dict[str, dict[str, bytes]] = {}
        self._metrics: defaultdict[str, dict[tuple[int, str, int, str], Metric]] = defaultdict(dict)
        self._statistics: dict[tuple[str, str, int, str], Statistics] = {}
        self._documents: dict[bytes, bytes] = {}
        self._keys: list[bytes] = []

    def rollout(self, rollout_id: str) -> Rollout | None:
        data = self._rollouts.get(rollout_id)
        return None if data is None else codec.decode(data, Rollout)

    def held(self, attempt_id: str) -> Claim | None:
        attempt = self._attempts.get(attempt_id)
        return attempt and Claim(rollout=need_rollout(self, attempt.rollout_id), attempt=attempt)

    def attempts(self, rollout_id: str) -> list[Attempt]:
        number = need_rollout(self, rollout_id).attempts
        found = (self._attempts.get(attempt_id_of(rollout_id, at)) for at in range(1, number + 1))
        return [attempt for attempt in found if attempt is not None]

    def queued(self, experiment: str | None, limit: int) -> list[Rollout]:
        queues = self._queue.lists
        oldest = heapq.merge(*queues.values()) if experiment is None else queues.get(experiment, [])
        return [need_rollout(self, rollout_id) for _, rollout_id in islice(oldest, limit)]

    def claimed(self, claim_id: str) -> list[Claim]:
        return [need_held(self, attempt_id) for *_, attempt_id in self._claims.lists.get(claim_id, [])]

    def overdue(self) -> list[Claim]:
        due = takewhile(lambda entry: entry[0] <= self.now, self._due.lists.get("", []))
        return [need_held(self, attempt_id) for *_, attempt_id in due]

    def is_running(self, rollout_id: str) -> bool:
        return need_rollout(self, rollout_id).status == "running"

    def next_deadline(self) -> float:
        """The time at which the next attempt becomes overdue, in Unix seconds; infinity if no attempt runs."""
        due = self._due.lists.get("")
        return due[0][0] if due else math.inf

    def add(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            self._added += 1
            self._order[rollout.rollout_id] = self._added
            self._grouped.put(rollout.rollout_id, rollout.rollout_id, rollout.group_id)
            self._put(rollout)

    def save(self, claims: Sequence[Claim], *, is_logged: bool = True) -> None:
        for claim in claims:
            attempt, attempt_id = claim.attempt, claim.attempt.attempt_id
            is_running = attempt.status == "running"
            # Sorts equal deadlines by their rollouts' place in the queue, so that equal writes make
            # equal tables.
            at = self._order[attempt.rollout_id], attempt.number, attempt_id
            self._attempts[attempt_id] = attempt
            self._due.put(attempt_id, (deadline(claim), *at), "" if is_running else None)
            self._claims.put(attempt_id, at, attempt.claim_id or None if is_running else None)
            if is_logged:
                self._put(claim.rollout)

    def save_rollouts(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            # Remove the attempt that its claimer never received; its number will be used again.
            self._drop(rollout.rollout_id, attempt_id_of(rollout.rollout_id, rollout.attempts + 1))
            self._put(rollout)

    def _drop(self, rollout_id: str, attempt_id: str) -> None:
        self._attempts.pop(attempt_id, None)
        self._spans.pop((rollout_id, attempt_id), None)
        self._due.put(attempt_id, None, None)
        self._claims.put(attempt_id, None, None)

    def _put(self, rollout: Rollout) -> None:
        rollout_id, is_queued = rollout.rollout_id, rollout.status == "queued"
        self._rollouts[rollout_id] = codec.encode(rollout)
        self._listed.put(rollout_id, rollout_id, (rollout.experiment, rollout.mode, rollout.status))
        self._queue.put(rollout_id, (self._order[rollout_id], rollout_id), rollout.experiment if is_queued else None)
        self.has_queued |= is_queued
        self._log("rollout", rollout, rollout.attempt_id or "")

    def rollouts(self, query: RolloutQuery) -> list[Rollout]:
        if query.ids:
            return queries.select([need_rollout(self, rollout_id) for rollout_id in query.ids], query)
        # There is one list, sorted by id, for each experiment, mode and status, so that the cost of
        # a page depends only on its size.
        lists = [ids for key, ids in self._listed.lists.items() if _matches(key, query)]
        if query.group_id:
            lists = [self._grouped.lists.get(query.group_id, [])]
        if query.sort != "rollout_id":
            return queries.select([need_rollout(self, rollout_id) for ids in lists for rollout_id in ids], query)
        merged = heapq.merge(*(_from(ids, query) for ids in lists), reverse=query.is_newest_first)
        found = (need_rollout(self, rollout_id) for rollout_id in merged)
        return list(islice((rollout for rollout in found if queries.is_wanted(rollout, query)), query.limit))

    def _log(self, kind: Literal["rollout", "spans"], rollout: Rollout, attempt_id: str) -> None:
        change = Change(
            cursor=self._cursor + 1,
            kind=kind,
            key=rollout.rollout_id,
            attempt_id=attempt_id,
            status=rollout.status,
            experiment=rollout.experiment,
        )
        self._changes_of[rollout.rollout_id].append(change.cursor)
        self._add_change(change)

    def _add_change(self, change: Change) -> None:
        self._cursor = change.cursor
        self._cursors.append(change.cursor)
        self._changes[change.cursor] = change

    def changes(self, after: int, limit: int) -> list[Change]:
        later = (self._cursors[at] for at in range(bisect_right(self._cursors, after), len(self._cursors)))
        return list(islice((self._changes[cursor] for cursor in later if cursor in self._changes), limit))

    def cursor(self) -> int:
        return self._cursor

    def insert_spans(self, spans: Sequence[Span]) -> list[Span]:
        rows: dict[tuple[_Spans, str], tuple[Span, bytes]] = {}
        ends: dict[tuple[str, str], int] = {}
        for span in spans:
            key, attempt = (span.rollout_id, span.attempt_id), self._attempts.get(span.attempt_id)
            kept = self._spans.setdefault(key, _Spans())
            # The second test is for a span that comes twice in one call.
            if span.span_id not in kept.ids and (kept, span.span_id) not in rows:
                is_late = attempt is not None and attempt.status != "running"
                placed = values.placed(span, last=ends.get(key, (kept.sequences or [0])[-1]), is_late=is_late)
                rows[kept, span.span_id] = placed, _pack(placed)
                ends[key] = placed.sequence
        # Packed first and added now: one span that cannot be packed must leave no trace of the
        # others.
        for (kept, span_id), (placed, data) in rows.items():
            kept.sequences.append(placed.sequence)
            kept.packed.append(data)
            kept.ids.add(span_id)
        for rollout_id, attempt_id in ends:
            self._log("spans", need_rollout(self, rollout_id), attempt_id)
        return [placed for placed, _ in rows.values()]

    def add_statistics(self, shares: Sequence[Statistics]) -> None:
        for share in shares:
            place = place_of(share)
            self._statistics[place] = self._statistics[place].plus(share) if place in self._statistics else share

    def statistics(self, experiment: str | None = None) -> list[Statistics]:
        found = [self._statistics[key] for key in sorted(self._statistics) if experiment in (None, key[0])]
        return [each for each in found if each.rollouts]

    def spans(
        self, rollout_id: str, *, attempt_id: str | None = None, after: int = 0, limit: int = 10_000
    ) -> list[Span]:
        rollout = need_rollout(self, rollout_id)
        which = rollout.attempt_id or "" if attempt_id is None else attempt_id
        if which and (rollout_id_of(which) != rollout_id or which not in self._attempts):
            raise unknown_attempt(rollout_id, which)
        kept = self._spans.get((rollout_id, which)) or _Spans()
        first = bisect_right(kept.sequences, after)
        return [_unpack(packed) for packed in kept.packed[first : first + limit]]

    def remove(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            rollout_id = rollout.rollout_id
            attempt_ids = [attempt.attempt_id for attempt in self.attempts(rollout_id)]
            for attempt_id in ("", *attempt_ids):
                self._drop(rollout_id, attempt_id)
            self._listed.put(rollout_id, None, None)
            self._grouped.put(rollout_id, None, None)
            for cursor in self._changes_of.pop(rollout_id):
                del self._changes[cursor]
            del self._rollouts[rollout_id], self._order[rollout_id]
        # Deleting from the middle of a list costs its length, so removed cursors stay until half of
        # them are gone.
        if len(self._cursors) > 2 * len(self._changes) + 1000:
            self._cursors = list(self._changes)

    def version(self, name: str, version: str | None) -> ResourceVersion | None:
        versions = self._versions.get(name, {})
        data = next(reversed(versions.values()), None) if version is None else versions.get(version)
        return None if data is None else codec.decode(data, ResourceVersion)

    def resources(self, name: str | None = None) -> list[ResourceVersion]:
        if name is None:
            return [found for each in sorted(self._versions) if (found := self.version(each, None)) is not None]
        return values.readable(self._versions.get(name, {}).values(), ResourceVersion)

    def add_version(self, version: ResourceVersion) -> None:
        self._versions.setdefault(version.name, {})[version.version] = codec.encode(version)
        self._add_change(Change(cursor=self._cursor + 1, kind="resource", key=version.name, status=version.version))

    def log_metrics(self, metrics: Sequence[Metric]) -> None:
        for metric in metrics:
            self._metrics[metric.experiment][metric.run, metric.algorithm, metric.step, metric.name] = metric

    def metrics(self, experiment: str, *, name: str | None = None, run: int | None = None) -> list[Metric]:
        of = self._metrics.get(experiment, {})
        return [of[key] for key in sorted(of) if name in (None, key[3]) and run in (None, key[0])]

    def get(self, key: bytes) -> bytes | None:
        return self._documents.get(key)

    def put(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        for key, value in pairs:
            if key not in self._documents:
                insort(self._keys, key)
            self._documents[key] = value

    def delete(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if self._documents.pop(key, None) is not None:
                del self._keys[bisect_left(self._keys, key)]

    def scan(self, start: bytes, stop: bytes, *, limit: int = sys.maxsize) -> list[tuple[bytes, bytes]]:
        keys = self._keys[bisect_left(self._keys, start) : bisect_left(self._keys, stop)]
        return [(key, self._documents[key]) for key in keys[:limit]]


def _matches(key: tuple[str, str, str], query: RolloutQuery) -> bool:
    experiment, mode, status = key
    return query.experiment in (None, experiment) and query.mode in (None, mode) and status in (query.status or key)


def _from(ids: list[str], query: RolloutQuery) -> Iterator[str]:
    """Yield the ids that come after ``query.after`` in the query's direction."""
    first = bisect_right(ids, query.after)
    end = bisect_left(ids, query.after) if query.after else len(ids)
    return (ids[at] for at in (range(end - 1, -1, -1) if query.is_newest_first else range(first, len(ids))))


def _pack(span: Span) -> bytes:
    """Pack a span as its length, its fields, and a deflated part.

    The deflated part holds a call's request and response, and the two high bytes of each token id.
    """
    call = span.call
    if call is None:
        return _joined(values.encoded(span), b"")
    # The two high bytes of an id are nearly always 0 and deflate to nothing. The low ones look
    # random, and deflating them would cost time and gain little.
    ids = call.prompt_ids + call.response_ids
    rest = values.encoded((call.request, call.response, len(call.prompt_ids), ids[2::4], ids[3::4]))
    bare = replace(call, request=None, response=None, prompt_ids=ids[0::4] + ids[1::4], response_ids=b"")
    deflated = zlib.compress(rest, 1 if len(rest) >= MIN_DEFLATED else 0)
    return _joined(values.encoded(replace(span, call=bare)), deflated)


def _joined(data: bytes, deflated: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data + deflated


def _unpack(packed: bytes) -> Span:
    """Unpack a span; the inverse of :func:`_pack`."""
    end = 4 + int.from_bytes(packed[:4], "little")
    span = codec.decode(memoryview(packed)[4:end], Span)
    if span.call is None:
        return span
    deflated = memoryview(packed)[end:]
    request, response, split, third, fourth = codec.decode(zlib.decompress(deflated), _Rest)
    low = span.call.prompt_ids
    ids = bytearray(len(low) + len(third) + len(fourth))
    first = len(ids[0::4])
    ids[0::4], ids[1::4], ids[2::4], ids[3::4] = low[:first], low[first:], third, fourth
    whole = {"prompt_ids": bytes(ids[:split]), "response_ids": bytes(ids[split:])}
    return replace(span, call=replace(span.call, request=request, response=response, **whole))


class _Memory:
    """The backend of the memory store; see :class:`agl.stores.Backend`."""

    shown_url = "memory://"

    def __init__(self, *, clock: Callable[[], float]) -> None:
        # Two bells: workers wait for work, everybody else for changes, and a step of spans must not
        # wake all workers.
        self.queued, self.changed = WakeUp(on_wait=self._pause_s), WakeUp(on_wait=self._pause_s)
        self._clock = clock
        self._lock = threading.Lock()
        self._tables = MemoryTables()
        self._is_closed = False

    async def write(self, work: Work[T]) -> T:
        return self._transact(work.do)

    async def read(self, look: Callable[[MemoryTables], T]) -> T:
        return self._transact(look)

    async def close(self) -> None:
        self._is_closed = True
        self.queued.ring()
        self.changed.ring()

    def _transact(self, act: Callable[[MemoryTables], T]) -> T:
        """Decide overdue attempts, run ``act`` and return its result; wakes waiters for the changes of both."""
        with self._lock:
            if self._is_closed:
                raise closed(self.shown_url)
            tables = self._tables
            cursor, tables.now, tables.has_queued = tables.cursor(), self._clock(), False
            try:
                # Before the operation, so that it sees no attempt as running whose time is over.
                expire(tables)
                return act(tables)
            finally:
                if tables.has_queued:
                    self.queued.ring()
                if tables.cursor() != cursor:
                    self.changed.ring()

    def _pause_s(self) -> float:
        with self._lock:
            return self._tables.next_deadline() - self._clock()


class MemoryStore(TableStore):
    """A :class:`agl.contracts.Store` in this process's memory.

    Args:
        url: ``memory://``; every object is a store of its own.
        clock: Unix seconds; leases and time limits follow it. By default it starts at the system's time and goes on
            evenly, however the system's clock is set.
    """

    def __init__(self, url: str = "memory://", *, clock: Callable[[], float] | None = None) -> None:
        if url.rstrip("/") != "memory:":
            raise StoreError(
                f"{url!r} is not a URL of a memory store; write memory://, or sqlite:///runs.db for a file"
            )
        # A lease must not lapse because the machine's clock was corrected.
        offset = time.time() - time.monotonic()
        super().__init__(_Memory(clock=clock or (lambda: time.monotonic() + offset)))
