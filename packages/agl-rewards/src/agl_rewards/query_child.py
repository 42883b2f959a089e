"""The program of a child process that runs untrusted queries for :mod:`agl_rewards.sandbox`.

Until its input ends, it reads a :class:`Query` from standard input and writes an :class:`Answer` to standard output,
each as msgpack after four bytes with the length. The database is opened read-only, and an authorizer permits only
reading: ``ATTACH``, ``PRAGMA``, writes, transactions and extensions are refused. A progress handler interrupts queries
that take too long; if a single function call takes too long, the operating system ends the process. The file imports
nothing from this project, so that a child starts quickly.
"""

import sqlite3
import sys
import time
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from typing import Any, BinaryIO, TypeVar

import msgspec

try:
    import resource
except ModuleNotFoundError:  # a system without limits for processes: the parent ends the child in time
    resource = None

MAX_BYTES = 10_000_000
"""Largest size of one value or row in bytes."""

MAX_LIKE_BYTES = 200
"""Longest ``LIKE`` or ``GLOB`` pattern in bytes; matching can take exponential time in the pattern's length."""

MAX_ANSWER_BYTES = 64 << 20
"""Largest size of all rows of an answer in bytes."""

MEMORY_BYTES = 512 << 20
"""Largest address space of a child in bytes."""

STEPS = 1000
"""Number of virtual machine instructions between two checks of the time limit; they take well below a millisecond."""

READING = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
FORBIDDEN = frozenset({"load_extension", "fts3_tokenizer"})

Row = tuple[Any, ...]
R = TypeVar("R")


class Query(msgspec.Struct, frozen=True):
    """A query: the SQL, the ``file:`` URI of the database, and the limits in seconds and rows."""

    uri: str
    sql: str
    time_s: float
    rows: int


class Answer(msgspec.Struct, frozen=True):
    """The rows of a query, at most one more than allowed, or its error.

    Attributes:
        rows: The rows; empty after an error.
        error: The error's message; ``""`` if there is none.
        kind: The name of the error's type.
        code: SQLite's name of the error.
    """

    rows: list[Row] = []
    error: str = ""
    kind: str = ""
    code: str = ""


def main() -> None:
    """Send an empty answer to signal readiness, then answer queries until the input ends."""
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    send(sys.stdout.buffer, msgspec.msgpack.encode(Answer()))
    while (query := receive(sys.stdin.buffer, Query)) is not None:
        _limit_processor_time(query.time_s)
        send(sys.stdout.buffer, msgspec.msgpack.encode(_answer(query)))


def receive(stream: BinaryIO, type: type[R]) -> R | None:
    """Read one frame (the length and the data); ``None`` at the end of the stream."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    length = int.from_bytes(head, "little")
    data = stream.read(length)
    return msgspec.msgpack.decode(data, type=type) if len(data) == length else None


def send(stream: BinaryIO, data: bytes) -> None:
    """Write one frame (the length and the data)."""
    stream.write(len(data).to_bytes(4, "little") + data)
    stream.flush()


def _limit_processor_time(time_s: float) -> None:
    """Let the operating system end this process a few seconds after the query's time limit."""
    if resource is not None:
        most = int(time.process_time() + time_s) + 3
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _answer(query: Query) -> Answer:
    try:
        with _database(query.uri, query.time_s) as connection:
            return Answer(rows=_rows(connection, query))
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
        return failure(error)


def failure(error: Exception) -> Answer:
    """Return the answer that reports an error."""
    kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
    return Answer(error=str(error) or kind, kind=kind, code=str(getattr(error, "sqlite_errorname", "")))


def _rows(connection: sqlite3.Connection, query: Query) -> list[Row]:
    """Return the query's rows, at most one more than the limit."""
    rows: list[Row] = []
    size = 0
    for row in connection.execute(query.sql):
        rows.append(row)
        size += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
        if size > MAX_ANSWER_BYTES:
            raise OverflowError(f"the query gives more than {MAX_ANSWER_BYTES >> 20} MB")
        if len(rows) > query.rows:
            break
    return rows


@contextmanager
def _database(uri: str, time_s: float) -> Generator[sqlite3.Connection]:
    with closing(sqlite3.connect(uri, uri=True, timeout=time_s, isolation_level=None)) as connection:
        restrict(connection, time_s)
        yield connection


def restrict(connection: sqlite3.Connection, time_s: float) -> None:
    """Permit a connection only to read, and only for ``time_s`` seconds."""
    connection.text_factory = _text
    # Three safeguards: the file is opened read-only, the connection is read-only, and the authorizer refuses the rest.
    connection.execute("PRAGMA query_only = 1")
    connection.execute("PRAGMA temp_store = MEMORY")  # so that sorting fills no disk
    _connect_virtual_tables(connection)
    for limit, most in (
        (sqlite3.SQLITE_LIMIT_LENGTH, MAX_BYTES),
        (sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, MAX_LIKE_BYTES),
        (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
    ):
        connection.setlimit(limit, most)
    connection.set_authorizer(_authorize)
    # SQLite asks every STEPS instructions; a true answer interrupts the query.
    end = time.monotonic() + time_s
    connection.set_progress_handler(lambda: time.monotonic() > end, STEPS)


def _connect_virtual_tables(connection: sqlite3.Connection) -> None:
    """Connect full-text and other virtual tables; declaring them needs rights that the connection is about to lose."""
    tables = "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage = 0"
    for (name,) in connection.execute(tables).fetchall():
        with suppress(sqlite3.Error):  # its module is not installed here: a query of that table fails later
            connection.execute('SELECT 1 FROM "{}" LIMIT 0'.format(name.replace('"', '""')))


def _text(data: bytes) -> str:
    # Databases hold text that is not UTF-8; sqlite3 would raise for it.
    return data.decode("utf-8", "replace")


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """Allow reading, and the pragma ``data_version``, which the full-text index needs; deny every other action."""
    is_allowed = action in READING and (action != sqlite3.SQLITE_FUNCTION or second not in FORBIDDEN)
    is_internal = action == sqlite3.SQLITE_PRAGMA and first == "data_version" and second is None
    return sqlite3.SQLITE_OK if is_allowed or is_internal else sqlite3.SQLITE_DENY


if __name__ == "__main__":
    main()
