"""Ends a transaction: turns the changes of its operations into commands, which a script runs all or none."""

import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from agl.schemas import Rollout, attempt_id_of, encode
from agl_run.sql import ATTEMPT_BITS, NUMBER_MASK, STATUSES, Changes, LoadedTables
from agl_store_redis.connections import Server
from agl_store_redis.layout import list_name
from agl_store_redis.loading import Loaded
from agl_store_redis.scripts import call

Part: TypeAlias = bytes | str | int | float

_MOST = 1000
"""Most values in one command; Lua passes on fewer than 8,000."""

_SORTS = ("rollout_id", "created_at", "finished_at")


class Commit:
    """The commands of one transaction.

    Attributes:
        is_empty: Whether there is nothing to write.
    """

    def __init__(self, loaded: Loaded, tables: LoadedTables) -> None:
        self._loaded, self._changes = loaded, tables.changes
        self._ids = {seq: rollout_id for rollout_id, seq in loaded.rows.seqs.items()}
        self._removed = set(self._changes.removed)
        self._args: list[Part] = []
        self._lists: set[str] = set()
        self._remove()
        self._save_rollouts()
        if self._lists:
            self._put_all("SADD", "lists", sorted(self._lists))
        self._give_back(tables)
        self._save_attempts()
        self._save_spans()
        self._save_records()
        for key, kind, status, name in self._changes.feed:
            self._feed(key, kind, status, name)
        self.is_empty = not self._args

    def run(self, server: Server, base: str, *, writer: str, number: int) -> bool:
        """Write everything, or return false if something that was loaded has changed; redis-py's errors pass."""
        comparisons = [part for comparison in self._loaded.comparisons for part in comparison]
        head = writer, number, len(self._loaded.comparisons), *comparisons
        return call(server, "commit", base, *head, *self._args, _message(self._changes)) == 1

    def _put(self, *command: Part) -> None:
        self._args += (len(command), *command)

    def _put_all(self, command: str, name: str, values: Sequence[Part]) -> None:
        for first in range(0, len(values), _MOST):
            self._put(command, name, *values[first : first + _MOST])

    def _remove(self) -> None:
        for seq in self._changes.removed:
            before = self._loaded.before.get(self._ids[seq])
            if before is None:
                continue  # added by this transaction
            rollout_id = before.rollout_id
            spans = [f"{rollout_id}/{number}" for number in range(before.attempts + 1)]
            for name in (f"r/{rollout_id}", *(f"{kind}/{each}" for each in spans for kind in "si")):
                self._put("UNLINK", name)
            self._put("FORGET", rollout_id)
            for name, _ in _lists(before):
                self._put("ZREM", name, rollout_id)
            for status in STATUSES:
                self._put("PRUNE", f"{before.experiment}/{before.mode}/{status}")

    def _save_rollouts(self) -> None:
        added = {seq: rollout for seq, rollout in self._changes.added if seq not in self._removed}
        for seq, rollout in (added | self._changes.rollouts).items():
            if seq in self._removed:
                continue
            is_queued = rollout.status == "queued"
            before = None if seq in added else self._loaded.before[rollout.rollout_id]
            if before is None:
                self._put("ADD", rollout.rollout_id, rollout.experiment, int(is_queued))
                self._put("HSET", f"r/{rollout.rollout_id}", "d", encode(added[seq]))
            elif (before.status == "queued") != is_queued:
                self._queue(rollout, seq, is_queued=is_queued)
            version = self._loaded.versions.get(rollout.rollout_id, 0) + 1
            self._put("HSET", f"r/{rollout.rollout_id}", "p", _progress(rollout, version))
            self._list(before, rollout)

    def _queue(self, rollout: Rollout, seq: int, *, is_queued: bool) -> None:
        for name in ("q", f"q/{rollout.experiment}"):
            if is_queued:
                self._put("ZADD", name, seq, rollout.rollout_id)
            else:
                self._put("ZREM", name, rollout.rollout_id)
        self._put("ZREM", "held", f"{rollout.experiment}/{rollout.rollout_id}")

    def _list(self, before: Rollout | None, rollout: Rollout) -> None:
        """Move a rollout from the lists of its status before to those of the new one."""
        old = dict(_lists(before)) if before is not None else {}
        new = dict(_lists(rollout))
        for name in old.keys() - new.keys():
            self._put("ZREM", name, rollout.rollout_id)
        for name, score in new.items():
            if name not in old:
                self._put("ZADD", name, repr(score), rollout.rollout_id)
        if before is None or before.status != rollout.status:
            self._lists.add(f"{rollout.experiment}/{rollout.mode}/{rollout.status}")

    def _give_back(self, tables: LoadedTables) -> None:
        """Queue again what no claim took."""
        for rollout_id, member in self._loaded.held.items():
            rollout = tables.rollout(rollout_id)
            if rollout is not None and rollout.status == "queued":
                seq = self._loaded.rows.seqs[rollout_id]
                for name in ("q", f"q/{rollout.experiment}"):
                    self._put("ZADD", name, seq, rollout_id)
                self._put("ZREM", "held", member)

    def _save_attempts(self) -> None:
        for key, row in self._changes.attempts.items():
            if key >> ATTEMPT_BITS in self._removed:
                continue
            rollout_id, number = self._ids[key >> ATTEMPT_BITS], key & NUMBER_MASK
            attempt_id = attempt_id_of(rollout_id, number)
            if row is None:
                self._put("HDEL", f"r/{rollout_id}", number)
                self._put("ZREM", "due", attempt_id)
                self._put("UNLINK", f"s/{rollout_id}/{number}")
                self._put("UNLINK", f"i/{rollout_id}/{number}")
                continue
            status, claim_id, deadline, data = row
            self._put("HSET", f"r/{rollout_id}", number, data)
            if status == "running":
                self._put("ZADD", "due", repr(deadline), attempt_id)
            else:
                self._put("ZREM", "due", attempt_id)
            if claim_id and status == "running":
                self._put("ZADD", f"c/{claim_id}", 0, attempt_id)
            elif claim_id:
                self._put("ZREM", f"c/{claim_id}", attempt_id)

    def _save_spans(self) -> None:
        spans: defaultdict[str, list[bytes]] = defaultdict(list)
        ids: defaultdict[str, list[Part]] = defaultdict(list)
        for key, sequence, span_id, data in self._changes.spans:
            if key >> ATTEMPT_BITS not in self._removed:
                name = f"{self._ids[key >> ATTEMPT_BITS]}/{key & NUMBER_MASK}"
                spans[name].append(struct.pack(">I", sequence) + data)
                ids[name] += (span_id, sequence)
        for name, rows in spans.items():
            self._put_all("RPUSH", f"s/{name}", rows)
            self._put_all("HSET", f"i/{name}", ids[name])

    def _save_records(self) -> None:
        for name, version, data in self._changes.versions:
            self._put("HSET", f"v/{name}", version, data)
            self._put("RPUSH", f"o/{name}", version)
            self._put("ZADD", "names", 0, name)
        documents = self._changes.documents
        if dropped := [key for key, value in documents.items() if value is None]:
            self._put_all("HDEL", "d", dropped)
            self._put_all("ZREM", "k", dropped)
        if saved := [(key, value) for key, value in documents.items() if value is not None]:
            self._put_all("HSET", "d", [part for pair in saved for part in pair])
            self._put_all("ZADD", "k", [part for key, _ in saved for part in (0, key)])
        for (experiment, run, algorithm, step, name), row in self._changes.metrics.items():
            self._put("SADD", f"mn/{experiment}", f"{run}/{name}")
            self._put("HSET", f"m/{experiment}/{run}/{name}", encode((algorithm, step)), encode(row))

    def _feed(self, key: int | None, kind: str, status: str, name: str | None) -> None:
        if key is None:
            self._put("FEED", "", encode((kind, status, name, 0, "")))
        elif (seq := key >> ATTEMPT_BITS) not in self._removed:
            rollout_id = self._ids[seq]
            experiment = self._loaded.rows.rollouts[rollout_id].experiment
            self._put("FEED", rollout_id, encode((kind, status, rollout_id, key & NUMBER_MASK, experiment)))


def _lists(rollout: Rollout) -> Iterable[tuple[str, float]]:
    """Return the lists of a rollout, and its values in them."""
    where = {"experiment": rollout.experiment, "mode": rollout.mode, "status": rollout.status}
    for field in _SORTS:
        if field != "finished_at" or rollout.is_finished:
            value = 0.0 if field == "rollout_id" else float(getattr(rollout, field))
            yield list_name(field, **where, is_finished=rollout.is_finished), value
    yield "ids", 0.0
    if rollout.group_id:
        yield f"g/{rollout.group_id}", 0.0


def _progress(rollout: Rollout, version: int) -> bytes:
    counts = rollout.attempts, rollout.failures, rollout.losses
    attempt = rollout.attempts if rollout.attempt_id else 0  # always the newest one
    return msgspec.msgpack.encode((version, rollout.status, *counts, attempt, rollout.started_at, rollout.finished_at))


def read_message(message: bytes) -> tuple[bool, bool, float]:
    """Parse a message: if rollouts were queued, if the feed grew, and the earliest deadline that was set."""
    flags, _, soonest = message.decode().partition(" ")
    return "q" in flags, "f" in flags, float(soonest)


def _message(changes: Changes) -> str:
    if not changes.is_heard:
        return ""
    return f"{'q' if changes.has_queued else ''}{'f' if changes.feed else ''} {changes.soonest!r}"
