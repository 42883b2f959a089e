"""Runs one untrusted query on a SQLite database: read-only, and with limits of time, rows and memory.

Queries run in child processes (see :mod:`agl_rewards.query_child`), which are reused. A query that does not end in time
is interrupted; if it cannot be interrupted, its child is killed.
"""

import os
import re
import sqlite3
import subprocess
import sys
import threading
import weakref
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, cast

import msgspec

from agl.errors import AglError, ConfigError
from agl_rewards import query_child
from agl_rewards.query_child import MEMORY_BYTES, Answer, Query, Row

Fault = Literal["none", "refused", "syntax", "execution"]
"""The kind of a query's failure: the query is missing, does more than read, cannot be parsed, or cannot be executed."""

MAX_SQL = 100_000
"""The most characters of one query."""

GRACE_S = 1.0
"""Seconds between a query's time limit and the kill of its child process, if SQLite did not interrupt the query."""

ENDED = "ended"
"""The ``kind`` of the answer that stands for a child process which ended without one."""

INHERITED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
"""Environment variables that a child inherits; no keys are among them."""

_UNPARSED = re.compile(r"syntax error|incomplete input|unrecognized token|parser stack overflow")
_TOKEN = re.compile(
    r"(?P<skip>\s+|--[^\n]*|/\*.*?(?:\*/|\Z))"
    r"|(?P<quoted>'(?:[^']|'')*'?|\"(?:[^\"]|\"\")*\"?|`(?:[^`]|``)*`?|\[[^\]]*\]?)"
    r"|(?P<word>\w+)|(?P<mark>.)",
    re.DOTALL,
)
_WRITES = re.compile(r"(?:^| )(?:insert|update|delete|replace into)(?: |$)")


class QueryError(AglError):
    """A query failed; ``fault`` is the kind of failure."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault: Fault = fault


class QueryLimits(NamedTuple):
    """The limits of a query: seconds and number of rows."""

    time_s: float = 5.0
    rows: int = 10_000


class QueryRunner:
    """Runs queries, at most as many at once as there are processors (but at least two); further queries wait.

    Args:
        limits: The limits of each query.
    """

    def __init__(self, limits: QueryLimits) -> None:
        self._limits = limits
        self._idle: list[_Child] = []
        self._turns = threading.BoundedSemaphore(max(2, os.cpu_count() or 2))
        weakref.finalize(self, _stop, self._idle)

    def run(self, database: Path, sql: str) -> list[Row]:
        """Return all rows of a query in SQLite's order.

        Raises:
            QueryError: The query is refused, wrong, too slow or too large.
            ConfigError: The file cannot be read as a SQLite database.
        """
        check_query(sql)
        limits = self._limits
        uri = f"{database.absolute().as_uri()}?mode=ro"
        answer = self._ask(Query(uri, sql, limits.time_s, limits.rows))
        if answer.error:
            raise _translated(answer, limits)
        if len(answer.rows) > limits.rows:
            raise QueryError("execution", f"the query gives more than {limits.rows} rows")
        return answer.rows

    def _ask(self, query: Query) -> Answer:
        """Return a child process's answer to a query; the process is reused unless it ended or ran out of memory."""
        try:
            data = msgspec.msgpack.encode(query)
        except UnicodeEncodeError as error:
            return Answer(error=str(error), kind="ValueError")
        with self._turns:
            child = self._child()
            answer = child.ask(data, limit_s=query.time_s + GRACE_S)
            if answer.kind in (ENDED, "MemoryError"):
                child.stop()
            else:
                self._idle.append(child)
            return answer

    def _child(self) -> "_Child":
        """Return an idle child process that is alive, or else a new one."""
        while self._idle:
            child = self._idle.pop()
            if child.is_alive:
                return child
            child.stop()
        return _Child()


class _Child:
    """A process that runs queries, one at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", query_child.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in INHERITED if name in os.environ},
        )
        self._receive()  # an empty answer says that it is ready; its start is not the first query's time

    def ask(self, data: bytes, *, limit_s: float) -> Answer:
        """Send a query and return its answer; the process is killed if this takes longer than ``limit_s`` seconds."""
        stopped = threading.Event()
        timer = threading.Timer(limit_s, self._end, (stopped,))
        timer.start()
        try:
            query_child.send(cast("BinaryIO", self._process.stdin), data)
            answer = self._receive()
        except BrokenPipeError:
            answer = None
        finally:
            timer.cancel()
        return answer or Answer(error="interrupted" if stopped.is_set() else "the query crashed SQLite", kind=ENDED)

    def _end(self, stopped: threading.Event) -> None:
        stopped.set()
        self._process.kill()

    def _receive(self) -> Answer | None:
        return query_child.receive(cast("BinaryIO", self._process.stdout), Answer)

    @property
    def is_alive(self) -> bool:
        """True if the process is running."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Kill the process."""
        self._process.kill()
        with suppress(BrokenPipeError), self._process:  # closes its pipes and waits for it
            pass


def _stop(children: list[_Child]) -> None:
    for child in children:
        child.stop()


def check_syntax(sql: str) -> None:
    """Raise :class:`QueryError` unless SQLite can parse the text as one query; tables and columns need not exist."""
    check_query(sql)
    limits = QueryLimits()
    try:
        # On an empty database a right query fails for want of its tables, which is a fault of execution and passes.
        with _translated_errors(limits), closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
            query_child.restrict(connection, limits.time_s)
            connection.execute(f"EXPLAIN {sql}")
    except QueryError as error:
        if error.fault != "execution":
            raise


def check_query(sql: str) -> None:
    """Raise :class:`QueryError` if the text is empty, is too long, or is not a query."""
    if len(sql) > MAX_SQL:
        raise QueryError("refused", f"the query is too large: {len(sql)} characters, more than {MAX_SQL}")
    words = outline(sql)
    if not words:
        raise QueryError("none", "there is no query")
    if words.split(" ")[0] not in ("select", "with", "values") or _WRITES.search(words):
        raise QueryError("refused", f"only queries run here, not {' '.join(words.split(' ')[:2]).upper()}")


def is_ordered(sql: str) -> bool:
    """Return true if the whole query orders its rows; an order in a subquery or window does not count."""
    return " order by " in f" {outline(sql)} "


def outline(sql: str) -> str:
    """Return the SQL tokens outside of parentheses, in lower case, joined by spaces; quoted ones become ``''``."""
    depth, words = 0, list[str]()
    for token in _TOKEN.finditer(sql):
        if token["mark"] in ("(", ")"):
            depth = max(0, depth + (1 if token["mark"] == "(" else -1))
            if depth == 0 and token["mark"] == ")":
                words.append("()")
        elif depth == 0 and not token["skip"]:
            words.append("''" if token["quoted"] else token[0].lower())
    return " ".join(words).rstrip("; ")


@contextmanager
def _translated_errors(limits: QueryLimits) -> Generator[None]:
    """Convert SQLite's errors within the block to the errors of :func:`_translated`."""
    try:
        yield
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
        raise _translated(query_child.failure(error), limits) from error


def _translated(answer: Answer, limits: QueryLimits) -> AglError:
    """Return SQLite's error as a :class:`QueryError`, or as a :class:`ConfigError` if the database file is broken."""
    message = answer.error
    if answer.code in ("SQLITE_NOTADB", "SQLITE_CORRUPT"):
        return ConfigError(f"a reward's database cannot be read: {message}; make it again, or name another")
    if answer.kind == "MemoryError":
        return QueryError("execution", f"the query needs more than {MEMORY_BYTES >> 20} MB of memory")
    if answer.kind == "ValueError" or "null character" in message:
        return QueryError("syntax", f"the query is not a text that SQLite reads ({message})")
    if "not authorized" in message or "prohibited" in message:
        return QueryError("refused", f"only queries that read run here ({message})")
    if "one statement" in message:
        return QueryError("refused", "only one query runs here, and the text holds several statements")
    if message == "interrupted":
        return QueryError("execution", f"the query was stopped after {limits.time_s:g} s")
    return QueryError("syntax" if _UNPARSED.search(message) else "execution", message)
