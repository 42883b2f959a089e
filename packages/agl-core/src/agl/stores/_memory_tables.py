"""The tables of the memory store: dicts, heaps and sorted lists, so that no operation walks over the store."""

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Literal

from agl.contracts import Change, RolloutQuery
from agl.schemas import Attempt, Claim, ResourceVersion, Rollout, Span
from agl.schemas import _codec as codec
from agl.schemas._ids import attempt_id_of
from agl.stores import rules
from agl.stores.packing import Packer, Unpacker, mark_late


class _Spans:
    """The spans of one attempt, packed, by sequence."""

    def __init__(self) -> None:
        self.sequences: list[int] = []
        self.packed: list[bytes] = []
        self.ids: set[str] = set()

    def add(self, sequence: int, span_id: str, packed: bytes) -> None:
        self.sequences.append(sequence)
        self.packed.append(packed)
        self.ids.add(span_id)

    def extend(self, other: "_Spans") -> None:
        self.sequences += other.sequences
        self.packed += other.packed
        self.ids |= other.ids

    def fetch(self, sequence: int) -> bytes:
        return self.packed[bisect_left(self.sequences, sequence)]


class MemoryTables:
    """See :class:`agl.stores.engine.Tables`.

    Rollouts are kept as given by the rules, which copied them, and copied again on the way out by the store.
    """

    def __init__(self) -> None:
        self.has_queued = False
        self.cursor = 0
        self._packer = Packer()
        self._rollouts: dict[str, Rollout] = {}
        self._added = 0
        self._order: dict[str, int] = {}
        self._listed: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
        self._queue: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        self._attempts: dict[str, Attempt] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._claims: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._spans: dict[tuple[str, str], _Spans] = {}
        self._cursors: list[int] = []
        self._changes: dict[int, Change] = {}
        self._changes_of: defaultdict[str, list[int]] = defaultdict(list)
        self._versions: dict[str, dict[str, bytes]] = {}

    def rollout(self, rollout_id: str) -> Rollout | None:
        return self._rollouts.get(rollout_id)

    def held(self, attempt_id: str) -> Claim | None:
        attempt = self._attempts.get(attempt_id)
        return attempt and Claim(rollout=self._rollouts[attempt.rollout_id], attempt=attempt)

    def attempts(self, rollout_id: str) -> list[Attempt]:
        number = self._rollouts[rollout_id].attempts
        return [self._attempts[attempt_id_of(rollout_id, at)] for at in range(1, number + 1)]

    def queued(self, experiment: str | None, limit: int) -> list[Rollout]:
        names = list(self._queue) if experiment is None else [experiment]
        oldest = heapq.merge(*(self._oldest(name, limit) for name in names))
        return [self._rollouts[rollout_id] for _, rollout_id in list(oldest)[:limit]]

    def _oldest(self, experiment: str, limit: int) -> list[tuple[int, str]]:
        """Up to ``limit`` valid entries of a queue, which stay in it; entries that are out of date are dropped."""
        heap = self._queue.get(experiment, [])
        found: list[tuple[int, str]] = []
        while heap and len(found) < limit:
            entry = heapq.heappop(heap)
            rollout = self._rollouts.get(entry[1])
            is_valid = rollout is not None and rollout.status == "queued" and self._order[entry[1]] == entry[0]
            if is_valid and entry not in found[-1:]:
                found.append(entry)
        for entry in found:
            heapq.heappush(heap, entry)
        if not heap:
            self._queue.pop(experiment, None)
        return found

    def claimed(self, claim_id: str) -> list[Claim]:
        claims = (self.held(attempt_id) for attempt_id in self._claims.get(claim_id, ()))
        return [claim for claim in claims if claim is not None]

    def overdue(self, now: float) -> list[Claim]:
        found: dict[str, Claim] = {}
        while self._deadlines and self._deadlines[0][0] <= now:
            claim = self.held(heapq.heappop(self._deadlines)[1])
            if claim is not None and claim.attempt.status == "running" and rules.deadline(claim) <= now:
                found[claim.attempt.attempt_id] = claim
        return sorted(found.values(), key=self._lapse_order)

    def _lapse_order(self, claim: Claim) -> tuple[float, int, int]:
        return rules.deadline(claim), self._order[claim.rollout.rollout_id], claim.attempt.number

    def next_deadline(self) -> float:
        """A lower bound of when the next attempt lapses; infinity when none runs."""
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def add(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            self._added += 1
            self._order[rollout.rollout_id] = self._added
            self._put(rollout)

    def open(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            self._watch(claim)
            if claim.attempt.claim_id:
                self._claims[claim.attempt.claim_id][claim.attempt.attempt_id] = None
            self._put(claim.rollout)

    def save(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            self._attempts[claim.attempt.attempt_id] = claim.attempt
            self._release(claim.attempt)
            self._put(claim.rollout)

    def save_rollouts(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            self._put(rollout)

    def renew(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            self._watch(claim)

    def drop(self, attempt: Attempt, rollout: Rollout) -> None:
        self._release(attempt)
        del self._attempts[attempt.attempt_id]
        self._put(rollout)

    def _watch(self, claim: Claim) -> None:
        self._attempts[claim.attempt.attempt_id] = claim.attempt
        heapq.heappush(self._deadlines, (rules.deadline(claim), claim.attempt.attempt_id))

    def _release(self, attempt: Attempt) -> None:
        held = self._claims.get(attempt.claim_id, {})
        held.pop(attempt.attempt_id, None)
        if not held:
            self._claims.pop(attempt.claim_id, None)
        self._packer.forget((attempt.rollout_id, attempt.attempt_id))

    def _put(self, rollout: Rollout) -> None:
        before = self._rollouts.get(rollout.rollout_id)
        if before is not None:
            self._unlist(before)
        self._rollouts[rollout.rollout_id] = rollout
        insort(self._listed[_list_of(rollout)], rollout.rollout_id)
        if rollout.status == "queued":
            heapq.heappush(self._queue[rollout.experiment], (self._order[rollout.rollout_id], rollout.rollout_id))
            self.has_queued = True
        self._log("rollout", rollout, rollout.attempt_id or "")

    def page(self, query: RolloutQuery) -> list[Rollout]:
        """Rollouts by id, from one sorted list for each (experiment, mode, status) that can match."""
        lists = [ids for key, ids in self._listed.items() if _matches(key, query)]
        sliced = (_from(ids, query) for ids in lists)
        merged = heapq.merge(*sliced, reverse=query.is_newest_first)
        found = (self._rollouts[rollout_id] for rollout_id in merged)
        wanted = (rollout for rollout in found if query.group_id in (None, rollout.group_id))
        return list(islice(wanted, query.limit))

    def _unlist(self, rollout: Rollout) -> None:
        key = _list_of(rollout)
        ids = self._listed[key]
        del ids[bisect_left(ids, rollout.rollout_id)]
        if not ids:
            del self._listed[key]

    def _log(self, kind: Literal["rollout", "spans"], rollout: Rollout, attempt_id: str) -> None:
        change = Change(
            cursor=self.cursor + 1,
            kind=kind,
            key=rollout.rollout_id,
            attempt_id=attempt_id,
            status=rollout.status,
            experiment=rollout.experiment,
        )
        self._changes_of[rollout.rollout_id].append(change.cursor)
        self._add_change(change)

    def _add_change(self, change: Change) -> None:
        self.cursor = change.cursor
        self._cursors.append(change.cursor)
        self._changes[change.cursor] = change

    def changes(self, *, after: int, limit: int) -> list[Change]:
        later = islice(self._cursors, bisect_right(self._cursors, after), None)
        found = (self._changes[cursor] for cursor in later if cursor in self._changes)
        return list(islice(found, limit))

    def insert_spans(self, spans: Sequence[Span]) -> None:
        """Packs all spans before it keeps the first, so that one that cannot be packed leaves no trace."""
        staged: dict[tuple[str, str], _Spans] = {}
        for span in spans:
            key = (span.rollout_id, span.attempt_id)
            into = staged.setdefault(key, _Spans())
            kept = self._spans.get(key, into)
            if span.span_id not in kept.ids and span.span_id not in into.ids:
                last = (into.sequences or kept.sequences or [0])[-1]
                into.add(
                    max(span.sequence, last + 1), span.span_id, self._pack(span, key, max(span.sequence, last + 1))
                )
        for key, into in staged.items():
            if into.ids:
                self._spans.setdefault(key, _Spans()).extend(into)
                self._log("spans", self._rollouts[key[0]], key[1])

    def _pack(self, span: Span, key: tuple[str, str], sequence: int) -> bytes:
        attempt = self._attempts.get(span.attempt_id)
        is_late = attempt is not None and attempt.status != "running"
        return self._packer.pack(mark_late(span, is_late=is_late), attempt=key, sequence=sequence)

    def spans(self, rollout_id: str, attempt_id: str, *, after: int, limit: int) -> list[Span]:
        kept = self._spans.get((rollout_id, attempt_id))
        if kept is None:
            return []
        first = bisect_right(kept.sequences, after)
        unpacker = Unpacker(kept.fetch)
        page = zip(kept.sequences[first : first + limit], kept.packed[first : first + limit], strict=True)
        return [unpacker.unpack(data, sequence=sequence) for sequence, data in page]

    def remove(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            rollout_id = rollout.rollout_id
            for attempt in self.attempts(rollout_id):
                del self._attempts[attempt.attempt_id]
                self._drop_spans(rollout_id, attempt.attempt_id)
            self._drop_spans(rollout_id, "")
            self._unlist(rollout)
            for cursor in self._changes_of.pop(rollout_id):
                del self._changes[cursor]
            del self._rollouts[rollout_id], self._order[rollout_id]
        if len(self._cursors) > 2 * len(self._changes) + 1000:
            self._cursors = list(self._changes)

    def _drop_spans(self, rollout_id: str, attempt_id: str) -> None:
        self._spans.pop((rollout_id, attempt_id), None)
        self._packer.forget((rollout_id, attempt_id))

    def version(self, name: str, version: str) -> ResourceVersion | None:
        data = self._versions.get(name, {}).get(version)
        return None if data is None else codec.decode(data, ResourceVersion)

    def versions(self, name: str) -> list[ResourceVersion]:
        return [codec.decode(data, ResourceVersion) for data in self._versions.get(name, {}).values()]

    def newest(self, name: str) -> ResourceVersion | None:
        data = next(reversed(self._versions.get(name, {}).values()), None)
        return None if data is None else codec.decode(data, ResourceVersion)

    def names(self) -> list[str]:
        return sorted(self._versions)

    def add_version(self, version: ResourceVersion) -> None:
        self._versions.setdefault(version.name, {})[version.version] = codec.encode(version)
        self._add_change(Change(cursor=self.cursor + 1, kind="resource", key=version.name, status=version.version))


def _matches(key: tuple[str, str, str], query: RolloutQuery) -> bool:
    experiment, mode, status = key
    return (
        query.experiment in (None, experiment)
        and query.mode in (None, mode)
        and (not query.status or status in query.status)
    )


def _from(ids: list[str], query: RolloutQuery) -> Iterator[str]:
    """The ids behind ``query.after`` in the query's direction."""
    if not query.is_newest_first:
        return islice(ids, bisect_right(ids, query.after), None)
    end = bisect_left(ids, query.after) if query.after else len(ids)
    return (ids[at] for at in range(end - 1, -1, -1))


def _list_of(rollout: Rollout) -> tuple[str, str, str]:
    return rollout.experiment, rollout.mode, rollout.status
