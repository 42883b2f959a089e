"""Runs one query that somebody else wrote on a SQLite database: read-only, with limits of time and rows.

The database is opened read-only, and an authorizer lets statements do nothing but read: ``ATTACH``, ``PRAGMA``,
writes, transactions and extensions are refused. A progress handler ends queries that take too long.

Limit: one call of a function such as ``LIKE`` over a long text is not interrupted before it returns.
"""

import re
import sqlite3
import time
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from agl.errors import AglError, ConfigError

Row = tuple[Any, ...]
Fault = Literal["none", "refused", "syntax", "execution"]
"""The fault of a query: there is none, it does more than read, SQLite cannot parse it, or it does not run."""

MAX_BYTES = 10_000_000
"""Largest size of one value or row."""

MAX_SQL = 100_000
"""Most characters of one query."""

MAX_LIKE_BYTES = 200
"""Longest ``LIKE`` or ``GLOB`` pattern; the time that it takes can grow exponentially with its length."""

_STEPS = 1000
"""Virtual machine instructions between two looks at the clock: well below a millisecond."""

_READING = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
_FORBIDDEN = frozenset({"load_extension", "fts3_tokenizer"})
_UNPARSED = re.compile(r"syntax error|incomplete input|unrecognized token|parser stack overflow")
_TOKEN = re.compile(
    r"(?P<skip>\s+|--[^\n]*|/\*.*?(?:\*/|\Z))"
    r"|(?P<quoted>'(?:[^']|'')*'?|\"(?:[^\"]|\"\")*\"?|`(?:[^`]|``)*`?|\[[^\]]*\]?)"
    r"|(?P<word>\w+)|(?P<mark>.)",
    re.DOTALL,
)
_WRITES = re.compile(r"(?:^| )(?:insert|update|delete|replace into)(?: |$)")


class QueryError(AglError):
    """A query gave no rows; ``fault`` is the kind of reason."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault: Fault = fault


class QueryLimits(NamedTuple):
    """The seconds that a query may take and the rows that it may give."""

    time_s: float = 5.0
    rows: int = 10_000


def run_query(database: Path, sql: str, *, limits: QueryLimits) -> list[Row]:
    """Return all rows of a query in SQLite's order.

    Raises:
        QueryError: The query is refused, wrong, too slow or too large.
        ConfigError: The file is not a SQLite database.
    """
    check_query(sql)
    with (
        _translated_errors(limits),
        closing(_open(f"{database.absolute().as_uri()}?mode=ro", limits.time_s)) as connection,
    ):
        rows = connection.execute(sql).fetchmany(limits.rows + 1)  # one more than allowed shows that there are more
    if len(rows) > limits.rows:
        raise QueryError("execution", f"the query gives more than {limits.rows} rows")
    return rows


def check_syntax(sql: str) -> None:
    """Raise :class:`QueryError` unless SQLite can parse the text as one query; names need not exist."""
    check_query(sql)
    try:
        # On an empty database a right query fails for want of its tables, which is a fault of execution and passes.
        with _translated_errors(QueryLimits()), closing(_open(":memory:", QueryLimits().time_s)) as connection:
            connection.execute(f"EXPLAIN {sql}")
    except QueryError as error:
        if error.fault != "execution":
            raise


def check_query(sql: str) -> None:
    """Raise :class:`QueryError` for an empty text and for a statement that is not a query."""
    if len(sql) > MAX_SQL:
        raise QueryError("refused", f"the query is too large: {len(sql)} characters, more than {MAX_SQL}")
    words = outline(sql)
    if not words:
        raise QueryError("none", "there is no query")
    if words.split(" ")[0] not in ("select", "with", "values") or _WRITES.search(words):
        raise QueryError("refused", f"only queries run here, not {' '.join(words.split(' ')[:2]).upper()}")


def is_ordered(sql: str) -> bool:
    """Return true when the query as a whole orders its rows, and not only a subquery or window in it."""
    return " order by " in f" {outline(sql)} "


def outline(sql: str) -> str:
    """Return the words and marks outside of parentheses, in lower case with one space between; quotes become ``''``."""
    depth, words = 0, list[str]()
    for token in _TOKEN.finditer(sql):
        if token["mark"] in ("(", ")"):
            depth = max(0, depth + (1 if token["mark"] == "(" else -1))
            if depth == 0 and token["mark"] == ")":
                words.append("()")
        elif depth == 0 and not token["skip"]:
            words.append("''" if token["quoted"] else token[0].lower())
    return " ".join(words).rstrip("; ")


def _open(uri: str, time_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, uri=True, timeout=time_s, isolation_level=None)
    try:
        _restrict(connection, time_s)
    except BaseException:
        connection.close()
        raise
    return connection


def _restrict(connection: sqlite3.Connection, time_s: float) -> None:
    connection.text_factory = _text
    # Three safeguards: the file is opened read-only, the connection is read-only, and the authorizer refuses the rest.
    connection.execute("PRAGMA query_only = 1")
    _connect_virtual_tables(connection)
    for limit, most in (
        (sqlite3.SQLITE_LIMIT_LENGTH, MAX_BYTES),
        (sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, MAX_LIKE_BYTES),
        (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
    ):
        connection.setlimit(limit, most)
    connection.set_authorizer(_authorize)
    # SQLite asks every _STEPS instructions; a true answer interrupts the query.
    end = time.monotonic() + time_s
    connection.set_progress_handler(lambda: time.monotonic() > end, _STEPS)


def _connect_virtual_tables(connection: sqlite3.Connection) -> None:
    """Connect full-text and other virtual tables while all is allowed: declaring them takes more than reading."""
    tables = "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage = 0"
    for (name,) in connection.execute(tables).fetchall():
        with suppress(sqlite3.Error):  # its module is not installed here: a query of that table fails later
            connection.execute('SELECT 1 FROM "{}" LIMIT 0'.format(name.replace('"', '""')))


def _text(data: bytes) -> str:
    # Databases hold text that is not UTF-8; sqlite3 would raise for it.
    return data.decode("utf-8", "replace")


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """Allow reading, and the one pragma by which the full-text index asks for the version of its data."""
    is_allowed = action in _READING and (action != sqlite3.SQLITE_FUNCTION or second not in _FORBIDDEN)
    is_internal = action == sqlite3.SQLITE_PRAGMA and first == "data_version" and second is None
    return sqlite3.SQLITE_OK if is_allowed or is_internal else sqlite3.SQLITE_DENY


@contextmanager
def _translated_errors(limits: QueryLimits) -> Generator[None]:
    """Turn SQLite's errors into :class:`QueryError`, and those of a broken file into :class:`ConfigError`."""
    try:
        yield
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
        if getattr(error, "sqlite_errorname", "") in ("SQLITE_NOTADB", "SQLITE_CORRUPT"):
            raise ConfigError(f"a reward's database cannot be read: {error}; make it again, or name another") from error
        message = str(error) or type(error).__name__
        if isinstance(error, ValueError) or "null character" in message:
            raise QueryError("syntax", f"the query is not a text that SQLite reads ({message})") from error
        if "not authorized" in message or "prohibited" in message:
            raise QueryError("refused", f"only queries that read run here ({message})") from error
        if "one statement" in message:
            raise QueryError("refused", "only one query runs here, and the text holds several statements") from error
        if message == "interrupted":
            raise QueryError("execution", f"the query was stopped after {limits.time_s:g} s") from error
        raise QueryError("syntax" if _UNPARSED.search(message) else "execution", message) from error
