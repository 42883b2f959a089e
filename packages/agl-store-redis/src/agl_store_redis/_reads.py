"""Answers reads by scripts; each script sees the store at one moment."""

import sys
from collections.abc import Mapping, Sequence
from itertools import islice

import msgspec
from msgspec.structs import replace

from agl.contracts import Change, Metric, RolloutQuery, Statistics
from agl.errors import NotFoundError
from agl.schemas import TERMINAL_ROLLOUT, Attempt, ResourceVersion, Rollout, Span, attempt_id_of, decode
from agl.stores import MAX_SEQUENCE, readable, select, start_of, unknown_attempt
from agl_store_redis.connections import Server
from agl_store_redis.layout import list_name
from agl_store_redis.loading import read_stored, status_of
from agl_store_redis.scripts import call
from agl_store_sqlite.sql.packing import Unpacker
from agl_store_sqlite.sql.rows import MODES, STATUSES, by_status, containing, number_of, read_attempt, readable_page
from agl_store_sqlite.sql.statistics import read_statistics

_PART_BYTES = 8 << 20
"""Bytes of spans that one script returns at most, apart from the last few spans."""

_DOCUMENTS = 10_000
"""Documents that one script returns at most."""


class VanishedError(Exception):
    """Raised when a rollout was removed between two parts of one read; the read must start again."""


class RedisReads:
    """Implements :class:`agl.stores.Reads` for one read.

    A rollout and its attempts are read atomically. Its spans are read later: by default those of the attempt that had
    decided the rollout, or was running, at that time.
    """

    def __init__(self, server: Server, base: str) -> None:
        self._server = server
        self._base = base
        self._seen: dict[str, tuple[Rollout, list[Attempt]]] = {}

    def changes(self, after: int, limit: int) -> list[Change]:
        if not limit:
            return []
        entries = self._server.run("XRANGE", f"{self._base}feed", f"{after + 1}-0", "+", "COUNT", limit)
        return [_change(int(cursor.partition(b"-")[0]), data) for cursor, (_, data) in entries]

    def cursor(self) -> int:
        return int(self._server.run("HGET", f"{self._base}meta", "cursor") or 0)

    def rollouts(self, query: RolloutQuery) -> list[Rollout]:
        if query.ids:
            return select(self._named(query.ids), query)
        if query.contains:
            return list(islice(containing(self.rollouts, query), query.limit))
        if query.group_id:
            every = self._page([f"g/{query.group_id}"], RolloutQuery(limit=(1 << 53) - 1))
            return select(every, query)
        if query.sort == "status":
            return by_status(self.rollouts, query)
        if query.group_id is not None:
            return self._without_group(query)
        is_filtered = query.experiment is not None or query.mode is not None or query.status
        if query.sort == "rollout_id" and not is_filtered:
            return self._page(["ids"], query)
        return self._page(_names(query), query)

    def _without_group(self, query: RolloutQuery) -> list[Rollout]:
        """Return a page of rollouts without a group, for which there is no list."""
        found: list[Rollout] = []
        part = replace(query, group_id=None, limit=500)
        while len(found) < query.limit and (page := self.rollouts(part)):
            found += [rollout for rollout in page if not rollout.group_id]
            part = part.next(page[-1])
        return found[: query.limit]

    def _named(self, ids: tuple[str, ...]) -> list[Rollout]:
        rows = self._server.run_all([("HGETALL", f"{self._base}r/{rollout_id}") for rollout_id in ids])
        for rollout_id, row in zip(ids, rows, strict=True):
            if not row:
                raise NotFoundError("rollout", rollout_id)
        return [self._read((rollout_id, _pairs(row))) for rollout_id, row in zip(ids, rows, strict=True)]

    def _page(self, names: Sequence[str], query: RolloutQuery) -> list[Rollout]:
        """Return a page of the rollouts in the lists ``names``; without names, in the lists of all experiments."""
        value, after_id = start_of(query) if query.after else (0.0, "")
        statuses = query.status or STATUSES
        request = {
            "lists": names,
            "modes": dict.fromkeys(MODES if query.mode is None else [query.mode], True),
            "statuses": {each: _field(query, each) for each in statuses},
            "after_id": after_id,
            "after_value": 0.0 if query.sort == "rollout_id" else float(value or 0),
            "is_newest_first": query.is_newest_first,
        }

        def fetch(limit: int) -> list[tuple[str, Mapping[bytes, bytes]]]:
            rows = call(self._server, "page", self._base, msgspec.msgpack.encode({**request, "limit": limit}))
            return [(rollout_id.decode(), _pairs(row)) for rollout_id, row in rows]

        return readable_page(fetch, self._read, query.limit)

    def _read(self, found: tuple[str, Mapping[bytes, bytes]]) -> Rollout:
        rollout_id, row = found
        rollout = read_stored(rollout_id, int(row[b"n"]), row.get(b"p", b""), row.get(b"d", b""))
        numbers = sorted(int(name) for name in row if name.isdigit())
        attempts = [
            read_attempt(row[b"%d" % number], rollout_id, number=number, status=status_of(rollout, number))
            for number in numbers
        ]
        self._seen[rollout_id] = rollout, attempts
        return rollout

    def count_rollouts(self, query: RolloutQuery) -> int:
        if query.ids or query.group_id is not None:
            return len(self.rollouts(replace(query, after="", limit=(1 << 53) - 1)))
        if query.contains:
            return sum(1 for _ in containing(self.rollouts, replace(query, after="")))
        names = _names(replace(query, sort="rollout_id")) or self._all_names(query)
        return sum(self._server.run_all([("ZCARD", f"{self._base}{name}") for name in names]))

    def _all_names(self, query: RolloutQuery) -> list[str]:
        members = self._server.run("SMEMBERS", f"{self._base}lists")
        parts = [member.decode().split("/") for member in members]
        modes = MODES if query.mode is None else (query.mode,)
        wanted = [each for each in parts if each[1] in modes and each[2] in (query.status or STATUSES)]
        return [f"by/rollout_id/{'/'.join(each)}" for each in wanted]

    def attempts(self, rollout_id: str) -> list[Attempt]:
        if rollout_id not in self._seen:
            self._named((rollout_id,))
        return self._seen[rollout_id][1]

    def spans(
        self, rollout_id: str, *, attempt_id: str | None = None, after: int = 0, limit: int = 10_000
    ) -> list[Span]:
        number = str(number_of(attempt_id) if attempt_id else 0)
        if attempt_id is None:
            seen = self._seen.get(rollout_id)
            number = "" if seen is None else str(seen[0].attempts if seen[0].attempt_id else 0)

        def part(after: int, limit: int) -> tuple[bytes, int, int, list[bytes]]:
            where = rollout_id, number, min(after, MAX_SEQUENCE), min(limit, MAX_SEQUENCE), _PART_BYTES
            found = call(self._server, "spans", self._base, *where)
            if found is None and rollout_id in self._seen:
                raise VanishedError
            if found is None:
                raise NotFoundError("rollout", rollout_id)
            return found

        which, is_known, has_more, rows = part(after, limit)
        if attempt_id and (not is_known or attempt_id != attempt_id_of(rollout_id, int(which)) or which == b"0"):
            raise unknown_attempt(rollout_id, attempt_id)
        number = which.decode()
        while has_more:
            _, _, has_more, more = part(_sequence(rows[-1]), limit - len(rows))
            rows += more

        def fetch(sequence: int) -> bytes:
            return part(sequence - 1, 1)[3][0][4:]

        unpacker = Unpacker(fetch, rollout_id=rollout_id, number=int(number))
        return [unpacker.unpack(row[4:], sequence=_sequence(row)) for row in rows]

    def version(self, name: str, version: str | None) -> ResourceVersion | None:
        if version is None:
            found = call(self._server, "versions", self._base, "newest", name)
            return decode(found[0], ResourceVersion) if found else None
        data = self._server.run("HGET", f"{self._base}v/{name}", version)
        return None if data is None else decode(data, ResourceVersion)

    def resources(self, name: str | None = None) -> list[ResourceVersion]:
        which = ("newest",) if name is None else ("all", name)
        return readable(call(self._server, "versions", self._base, *which), ResourceVersion)

    def get(self, key: bytes) -> bytes | None:
        return self._server.run("HGET", f"{self._base}d", key)

    def scan(self, start: bytes, stop: bytes, *, limit: int = sys.maxsize) -> list[tuple[bytes, bytes]]:
        found: list[tuple[bytes, bytes]] = []
        first = b"[" + start
        while True:
            row = call(self._server, "scan", self._base, first, b"(" + stop, min(_DOCUMENTS, limit - len(found)))
            found += zip(row[::2], row[1::2], strict=True)
            if len(row) < 2 * _DOCUMENTS or len(found) >= limit:
                return found
            first = b"(" + row[-2]

    def metrics(self, experiment: str, *, name: str | None = None, run: int | None = None) -> list[Metric]:
        members = self._server.run("SMEMBERS", f"{self._base}mn/{experiment}")
        parts = [member.decode().partition("/") for member in members]
        kept = [(int(each), title) for each, _, title in parts if name in (None, title) and run in (None, int(each))]
        of = f"{self._base}m/{experiment}"
        tables = self._server.run_all([("HGETALL", f"{of}/{each}/{title}") for each, title in kept])
        found: list[Metric] = []
        for (each, title), rows in zip(kept, tables, strict=True):
            for key, row in _pairs(rows).items():
                algorithm, step = msgspec.msgpack.decode(key)
                experiment_step, value, time = msgspec.msgpack.decode(row)
                number = {"step": step, "experiment_step": experiment_step, "value": value, "time": time}
                found.append(Metric(experiment=experiment, run=each, algorithm=algorithm, name=title, **number))
        return sorted(found, key=lambda metric: (metric.run, metric.algorithm, metric.step, metric.name))

    def statistics(self, experiment: str | None = None) -> list[Statistics]:
        if experiment is None:
            names = [name.decode() for name in self._server.run("SMEMBERS", f"{self._base}stn")]
        else:
            names = [experiment]
        tables = self._server.run_all([("HGETALL", f"{self._base}st/{name}") for name in names])
        rows = [
            (name, *msgspec.msgpack.decode(key), *sums[:3], float(sums[3]), *sums[4:8], *map(float, sums[8:]))
            for name, table in zip(names, tables, strict=True)
            for key, row in _pairs(table).items()
            for sums in [msgspec.msgpack.decode(row)]
        ]
        return read_statistics(rows)


def _names(query: RolloutQuery) -> list[str]:
    """Return the names of the lists for a query of one experiment; empty for a query of all experiments."""
    if query.experiment is None:
        return []
    modes = MODES if query.mode is None else (query.mode,)
    return [
        list_name(query.sort, experiment=query.experiment, mode=mode, status=each, is_finished=each in TERMINAL_ROLLOUT)
        for mode in modes
        for each in (query.status or STATUSES)
    ]


def _field(query: RolloutQuery, status: str) -> str:
    """Return the prefix of the names of the lists that sort rollouts of a status in the query's order."""
    whole = list_name(query.sort, experiment="", mode="", status="", is_finished=status in TERMINAL_ROLLOUT)
    return whole.removesuffix("///")


def _pairs(row: Sequence[bytes]) -> dict[bytes, bytes]:
    """Return a hash as a dict, given its fields and values in turn."""
    return dict(zip(row[::2], row[1::2], strict=True))


def _sequence(row: bytes) -> int:
    return int.from_bytes(row[:4], "big")


def _change(cursor: int, data: bytes) -> Change:
    kind, status, key, number, experiment = msgspec.msgpack.decode(data)
    attempt_id = attempt_id_of(key, number) if number else ""
    return Change(cursor=cursor, kind=kind, key=key, attempt_id=attempt_id, status=status, experiment=experiment)
