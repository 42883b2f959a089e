"""Ends a transaction: turns the changes of its operations into commands, which one script runs atomically."""

import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from agl.contracts import Statistics
from agl.schemas import Rollout, attempt_id_of, encode
from agl_store_redis.connections import Server
from agl_store_redis.layout import list_name
from agl_store_redis.loading import Loaded
from agl_store_redis.scripts import call
from agl_store_sqlite.sql.loaded_tables import LoadedTables
from agl_store_sqlite.sql.rows import ATTEMPT_BITS, MODES, NUMBER_MASK, STATUSES
from agl_store_sqlite.sql.statistics import additions, statistics_row

Part: TypeAlias = bytes | str | int | float

_MOST = 1000
"""Most values in one command; Lua passes on fewer than 8,000."""

COUNT_PARTS = 12

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
        self._sorted: defaultdict[str, dict[Part, str | None]] = defaultdict(dict)
        self._hashes: defaultdict[str, dict[Part, Part | None]] = defaultdict(dict)
        self._sets: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._remove()
        self._save_rollouts()
        self._give_back(tables)
        self._save_attempts()
        self._save_spans()
        self._save_records()
        self._save_statistics()
        self._put_collected()
        self._prune()
        self._feed()
        self.is_empty = not self._args

    def run(self, server: Server, base: str, *, writer: str, number: int) -> bool:
        """Write everything; returns false, and writes nothing, if loaded data has changed. redis-py's errors pass."""
        comparisons = [part for comparison in self._loaded.comparisons for part in comparison]
        head = writer, number, len(self._loaded.comparisons), *comparisons
        return (
            call(server, "commit", base, *head, *self._args, self._changes.message if self._changes.is_heard else "")
            == 1
        )

    def _put(self, *command: Part) -> None:
        self._args.append(len(command))
        self._args += command

    def _put_all(self, command: str, *name: str, values: Sequence[Part], each: int = 1) -> None:
        """Add commands for many values; each run of ``each`` values stays in one command."""
        most = _MOST // each * each
        for first in range(0, len(values), most):
            self._put(command, *name, *values[first : first + most])

    def _put_collected(self) -> None:
        """Add the commands for the collected changes of sorted sets, hashes and sets."""
        for name, scores in self._sorted.items():
            self._put_all("ZREM", name, values=[member for member, score in scores.items() if score is None])
            added = [part for member, score in scores.items() if score is not None for part in (score, member)]
            self._put_all("ZADD", name, values=added, each=2)
        for name, fields in self._hashes.items():
            self._put_all("HDEL", name, values=[field for field, value in fields.items() if value is None])
            saved = [part for field, value in fields.items() if value is not None for part in (field, value)]
            self._put_all("HSET", name, values=saved, each=2)
        for name, members in self._sets.items():
            self._put_all("SADD", name, values=list(members))

    def _remove(self) -> None:
        for before in self._gone():
            rollout_id = before.rollout_id
            spans = [f"{rollout_id}/{number}" for number in range(before.attempts + 1)]
            for name in (f"r/{rollout_id}", *(f"{kind}/{each}" for each in spans for kind in "si")):
                self._put("UNLINK", name)
            self._put("FORGET", rollout_id)
            # Of the rollouts that can be read, only finished ones are removed.
            for name, _ in _lists(before) if before.is_finished else _every_list(before):
                self._sorted[name][rollout_id] = None

    def _prune(self) -> None:
        """Let the server forget the lists that are empty now."""
        names = dict.fromkeys(
            f"{each.experiment}/{mode}/{status}" for each in self._gone() for mode in MODES for status in STATUSES
        )
        self._put_all("PRUNE", values=list(names))

    def _gone(self) -> Iterator[Rollout]:
        """Yield the removed rollouts, except those that this transaction added."""
        found = (self._loaded.before.get(self._ids[seq]) for seq in self._changes.removed)
        return (before for before in found if before is not None)

    def _save_rollouts(self) -> None:
        added = {seq: rollout for seq, rollout in self._changes.added if seq not in self._removed}
        new: list[Part] = []
        for seq, rollout in (added | self._changes.rollouts).items():
            if seq in self._removed:
                continue
            is_queued = rollout.status == "queued"
            before = None if seq in added else self._loaded.before[rollout.rollout_id]
            stored = self._hashes[f"r/{rollout.rollout_id}"]
            if before is None:
                new += (rollout.rollout_id, rollout.experiment, int(is_queued))
                stored["d"] = encode(added[seq])
            elif (before.status == "queued") != is_queued:
                self._queue(rollout, seq, is_queued=is_queued)
            version = self._loaded.versions.get(rollout.rollout_id, 0) + 1
            stored["p"] = _progress(rollout, version)
            self._list(before, rollout)
        self._put_all("ADD", values=new, each=3)

    def _queue(self, rollout: Rollout, seq: int, *, is_queued: bool) -> None:
        for name in ("q", f"q/{rollout.experiment}"):
            self._sorted[name][rollout.rollout_id] = str(seq) if is_queued else None
        self._sorted["held"][f"{rollout.experiment}/{rollout.rollout_id}"] = None

    def _list(self, before: Rollout | None, rollout: Rollout) -> None:
        """Move a rollout from the lists for the earlier state to the lists for the new state."""
        old = dict(_lists(before)) if before is not None else {}
        new = dict(_lists(rollout))
        for name in old.keys() - new.keys():
            self._sorted[name][rollout.rollout_id] = None
        for name in new.keys() - old.keys():
            self._sorted[name][rollout.rollout_id] = repr(new[name])
        if before is None or before.status != rollout.status:
            self._sets["lists"][f"{rollout.experiment}/{rollout.mode}/{rollout.status}"] = None

    def _give_back(self, tables: LoadedTables) -> None:
        """Queue the rollouts again that the transaction took from the queue and that no claim took."""
        for rollout_id in self._loaded.held:
            rollout = tables.rollout(rollout_id)
            if rollout is not None and rollout.status == "queued":
                self._queue(rollout, self._loaded.rows.seqs[rollout_id], is_queued=True)

    def _save_attempts(self) -> None:
        for key, row in self._changes.attempts.items():
            if key >> ATTEMPT_BITS in self._removed:
                continue
            rollout_id, number = self._ids[key >> ATTEMPT_BITS], key & NUMBER_MASK
            attempt_id = attempt_id_of(rollout_id, number)
            status, claim_id, deadline, data = row or ("", "", 0.0, None)
            self._hashes[f"r/{rollout_id}"][number] = data
            self._sorted["due"][attempt_id] = repr(deadline) if status == "running" else None
            if claim_id:
                self._sorted[f"c/{claim_id}"][attempt_id] = "0" if status == "running" else None
            if row is None:
                self._put("UNLINK", f"s/{rollout_id}/{number}")
                self._put("UNLINK", f"i/{rollout_id}/{number}")

    def _save_spans(self) -> None:
        spans: defaultdict[str, list[bytes]] = defaultdict(list)
        for key, sequence, span_id, data in self._changes.spans:
            if key >> ATTEMPT_BITS not in self._removed:
                name = f"{self._ids[key >> ATTEMPT_BITS]}/{key & NUMBER_MASK}"
                spans[name].append(struct.pack(">I", sequence) + data)
                self._hashes[f"i/{name}"][span_id] = sequence
        for name, rows in spans.items():
            self._put_all("RPUSH", f"s/{name}", values=rows)

    def _save_records(self) -> None:
        for name, version, data in self._changes.versions:
            self._hashes[f"v/{name}"][version] = data
            self._put("RPUSH", f"o/{name}", version)
            self._sorted["names"][name] = "0"
        for key, value in self._changes.documents.items():
            self._hashes["d"][key] = value
            self._sorted["k"][key] = None if value is None else "0"
        for (experiment, run, algorithm, step, name), row in self._changes.metrics.items():
            self._sets[f"mn/{experiment}"][f"{run}/{name}"] = None
            self._hashes[f"m/{experiment}/{run}/{name}"][encode((algorithm, step))] = encode(row)

    def _save_statistics(self) -> None:
        for shares in additions(self._changes.shares):
            self._put_all("COUNT", values=counts_of(shares), each=COUNT_PARTS)

    def _feed(self) -> None:
        changes: list[Part] = []
        for key, kind, status, name in self._changes.feed:
            if key is None:
                changes += ("", encode((kind, status, name, 0, "")))
            elif (seq := key >> ATTEMPT_BITS) not in self._removed:
                rollout_id = self._ids[seq]
                experiment = self._loaded.rows.rollouts[rollout_id].experiment
                changes += (rollout_id, encode((kind, status, rollout_id, key & NUMBER_MASK, experiment)))
        self._put_all("FEED", values=changes, each=2)


def counts_of(shares: Sequence[Statistics]) -> list[Part]:
    """Return the arguments of the command ``COUNT``, :data:`COUNT_PARTS` for each element of ``shares``."""
    parts: list[Part] = []
    for share in shares:
        experiment, *place, succeeded, failed, cancelled, seconds, calls, prompts, responses, rewards, mean, squares = (
            statistics_row(share)
        )
        sums = succeeded, failed, cancelled, repr(seconds), calls, prompts, responses
        parts += experiment, encode(place), *sums, rewards, repr(mean), repr(squares)
    return parts


def _lists(rollout: Rollout) -> Iterable[tuple[str, float]]:
    """Yield the name of each list that holds a rollout, with the value by which the list sorts the rollout."""
    where = {"experiment": rollout.experiment, "mode": rollout.mode, "status": rollout.status}
    for field in _SORTS:
        if field != "finished_at" or rollout.is_finished:
            value = 0.0 if field == "rollout_id" else float(getattr(rollout, field))
            yield list_name(field, **where, is_finished=rollout.is_finished), value
    yield "ids", 0.0
    if rollout.group_id:
        yield f"g/{rollout.group_id}", 0.0


def _every_list(damaged: Rollout) -> Iterable[tuple[str, float]]:
    """Yield all lists that may hold a damaged rollout, except that of its group."""
    for mode, status in product(MODES, STATUSES):
        yield from _lists(replace(damaged, mode=mode, status=status))
    yield "q", 0.0
    yield f"q/{damaged.experiment}", 0.0


def _progress(rollout: Rollout, version: int) -> bytes:
    counts = rollout.attempts, rollout.failures, rollout.losses
    attempt = rollout.attempts if rollout.attempt_id else 0  # the newest attempt
    return msgspec.msgpack.encode((version, rollout.status, *counts, attempt, rollout.started_at, rollout.finished_at))
