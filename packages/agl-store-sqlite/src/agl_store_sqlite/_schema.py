"""The layout of the SQLite file: opens it, and migrates older layouts.

Rollouts and attempts are numbered as in :mod:`agl_store_sqlite.sql`, spans ``attempt << 24 | sequence``, so that
removing a rollout removes ranges.
A rollout's ``stage`` is ``open`` while it is queued or running and its status after that: rollouts are listed by stage,
so that a claim does not touch that index. Running ones are found through their attempts.
"""

import logging
import re
import sqlite3
import time
from functools import partial
from pathlib import Path

from agl.contracts import RolloutQuery
from agl.errors import SchemaVersionError, StoreError
from agl.schemas import Attempt, Rollout, Span, decode, encode
from agl.stores import MAX_SEQUENCE
from agl_store_sqlite._reads import SQLiteReads
from agl_store_sqlite._tables import add_statistics
from agl_store_sqlite.sql import ATTEMPT_BITS, older_documents, record_key, recount, run_of

SETTINGS = (
    "page_size = 4096",
    "synchronous = FULL",
    "temp_store = MEMORY",
    "wal_autocheckpoint = 4000",
    "cache_size = -16000",
)

READER_SETTINGS = ("query_only = ON", "cache_size = -4000")
"""Settings of a connection that only reads, of which a store has several: each fills a cache of so many kilobytes."""

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE rollouts (
            seq INTEGER PRIMARY KEY AUTOINCREMENT, rollout_id TEXT NOT NULL UNIQUE, experiment TEXT NOT NULL,
            mode TEXT NOT NULL, group_id TEXT NOT NULL, status TEXT NOT NULL, stage TEXT NOT NULL,
            attempts INTEGER NOT NULL, attempt INTEGER, started_at REAL NOT NULL, finished_at REAL NOT NULL,
            data BLOB NOT NULL)""",
        """CREATE TABLE attempts (
            id INTEGER PRIMARY KEY, status TEXT NOT NULL, claim_id TEXT NOT NULL, deadline REAL NOT NULL,
            data BLOB NOT NULL)""",
        "CREATE TABLE spans (key INTEGER PRIMARY KEY, span_id TEXT NOT NULL, data BLOB NOT NULL)",
        "CREATE UNIQUE INDEX spans_by_id ON spans (key >> 24, span_id)",
        """CREATE TABLE changes (
            cursor INTEGER PRIMARY KEY, attempt INTEGER, kind TEXT NOT NULL, status TEXT NOT NULL,
            name TEXT)""",
        """CREATE TABLE versions (
            seq INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, version TEXT NOT NULL, data BLOB NOT NULL,
            UNIQUE (name, version))""",
        "CREATE TABLE states (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
        """CREATE TABLE metrics (
            experiment TEXT, algorithm TEXT, step INTEGER, name TEXT, value REAL, time REAL,
            PRIMARY KEY (experiment, algorithm, step, name)) WITHOUT ROWID""",
    ),
    (
        "CREATE INDEX rollouts_queue ON rollouts (experiment, seq) WHERE status = 'queued'",
        "CREATE INDEX rollouts_listed ON rollouts (experiment, mode, stage, rollout_id)",
        "CREATE INDEX rollouts_grouped ON rollouts (group_id, rollout_id) WHERE group_id <> ''",
        "CREATE INDEX attempts_due ON attempts (deadline) WHERE status = 'running'",
        "CREATE INDEX attempts_claimed ON attempts (claim_id) WHERE status = 'running' AND claim_id <> ''",
        "CREATE INDEX changes_by_attempt ON changes (attempt) WHERE attempt IS NOT NULL",
        "CREATE INDEX versions_by_name ON versions (name, seq)",
        "CREATE INDEX metrics_by_name ON metrics (experiment, name, algorithm, step)",
    ),
    ("CREATE TABLE documents (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",),
    (  # 14 bits for an attempt's number instead of 8, and counts of failures and lost workers
        "ALTER TABLE rollouts ADD COLUMN failures INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE rollouts ADD COLUMN losses INTEGER NOT NULL DEFAULT 0",
        "UPDATE rollouts SET failures = (SELECT count(*) FROM attempts WHERE status IN ('failed', 'timeout') "
        "AND id BETWEEN (seq << 8) AND (seq << 8) + 255), attempt = (attempt >> 8 << 14) + (attempt & 255) "
        "WHERE attempts > 0",
        "UPDATE changes SET attempt = (attempt >> 8 << 14) + (attempt & 255) WHERE attempt IS NOT NULL",
        "ALTER TABLE attempts RENAME TO narrow_attempts",
        """CREATE TABLE attempts (
            id INTEGER PRIMARY KEY, status TEXT NOT NULL, claim_id TEXT NOT NULL, deadline REAL NOT NULL,
            data BLOB NOT NULL)""",
        "INSERT INTO attempts SELECT (id >> 8 << 14) + (id & 255), status, claim_id, deadline, data "
        "FROM narrow_attempts ORDER BY id",
        "DROP TABLE narrow_attempts",
        "CREATE INDEX attempts_due ON attempts (deadline) WHERE status = 'running'",
        "CREATE INDEX attempts_claimed ON attempts (claim_id) WHERE status = 'running' AND claim_id <> ''",
        "ALTER TABLE spans RENAME TO narrow_spans",
        "CREATE TABLE spans (key INTEGER PRIMARY KEY, span_id TEXT NOT NULL, data BLOB NOT NULL)",
        "INSERT INTO spans SELECT (key >> 32 << 38) + (key & 4294967295), span_id, data FROM narrow_spans ORDER BY key",
        "DROP TABLE narrow_spans",
        "CREATE UNIQUE INDEX spans_by_id ON spans (key >> 24, span_id)",
    ),
    (  # lists in order of creation and of the end
        "ALTER TABLE rollouts ADD COLUMN created_at REAL NOT NULL DEFAULT 0.0",
        "UPDATE rollouts SET created_at = created_at(data)",
        "CREATE INDEX rollouts_created ON rollouts (experiment, mode, stage, created_at, rollout_id)",
        "CREATE INDEX rollouts_finished ON rollouts (experiment, mode, stage, finished_at, rollout_id)",
    ),
    (  # metrics of every run, with the steps of all algorithms
        "ALTER TABLE metrics RENAME TO metrics_of_last_run",
        """CREATE TABLE metrics (
            experiment TEXT, run INTEGER, algorithm TEXT, step INTEGER, name TEXT, experiment_step INTEGER, value REAL,
            time REAL, PRIMARY KEY (experiment, run, algorithm, step, name)) WITHOUT ROWID""",
        "INSERT INTO metrics SELECT experiment, run_of(record), algorithm, step, name, "
        "CASE algorithm WHEN 'validate' THEN step END, value, time FROM metrics_of_last_run "
        "LEFT JOIN (SELECT key, value AS record FROM documents) ON key = record_key(experiment)",
        "DROP TABLE metrics_of_last_run",
        "CREATE INDEX metrics_by_name ON metrics (experiment, name, run, algorithm, step)",
    ),
    (  # statistics, kept as rollouts finish
        """CREATE TABLE statistics (
            experiment TEXT, algorithm TEXT, step INTEGER, mode TEXT, succeeded INTEGER, failed INTEGER,
            cancelled INTEGER, seconds REAL, calls INTEGER, prompt_tokens INTEGER, response_tokens INTEGER,
            rewards INTEGER, mean REAL, squares REAL, PRIMARY KEY (experiment, algorithm, step, mode)) WITHOUT ROWID""",
    ),
)
"""Statements that bring a file of version N to N + 1; a new file runs them all."""

CURRENT = len(MIGRATIONS)

_LOG = logging.getLogger("agl_store_sqlite")

_TAIL = re.compile(r"[?#][^/\\]*$|\?\w+=")
"""Options or a fragment, as other URLs have them; a folder may have both characters in its name."""

_STATISTICS = 6
"""The last version without statistics and without the tallies of attempts."""

_STATES_MOVE = 2
"""The last version that keeps labels, scores, experiments and ledgers among the states of algorithms."""


def path_of(url: str) -> Path:
    """Return the file that a ``sqlite:///`` URL names: three slashes for a relative path, four for an absolute one."""
    path = url.removeprefix("sqlite:///")
    if path == url or not path or path == ":memory:":
        raise StoreError(
            f"{url!r} is no URL of a SQLite store; write sqlite:///runs.db for a file in this folder, "
            "sqlite:////data/runs.db for an absolute path, or memory:// for no file at all"
        )
    if tail := _TAIL.search(path):
        front = path[: tail.start()] or "runs.db"
        raise StoreError(
            f"the URL of a SQLite store has no options, and nothing may stand behind a ? or a # in it; write "
            f"sqlite:///{front}, or rename the file if its name has that character"
        )
    return Path(path)


def connect(path: Path, *, busy_s: float, is_reader: bool = False) -> sqlite3.Connection:
    """Open a connection for one thread at a time, with WAL and full durability."""
    connection = sqlite3.connect(path, timeout=busy_s, isolation_level=None, check_same_thread=False)
    try:
        for setting in (*SETTINGS, *(READER_SETTINGS if is_reader else ())):
            connection.execute(f"PRAGMA {setting}")
    except BaseException:
        connection.close()
        raise
    return connection


def open_file(path: Path, *, busy_s: float) -> sqlite3.Connection:
    """Create or migrate the file, and open the writer's connection to it.

    Raises:
        SchemaVersionError: A newer release wrote the file.
        StoreError: It cannot be created, read or written, or is no store.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"the folder {path.parent} cannot be created: {error}; choose a folder you own") from error
    connection: sqlite3.Connection | None = None
    try:
        connection = connect(path, busy_s=busy_s)
        _use_wal(connection, busy_s)
        _migrate(connection, path)
    except BaseException as error:
        if connection is not None:
            connection.close()
        if isinstance(error, sqlite3.Error):
            raise explain(error, path) from error
        raise
    return connection


def is_locked(error: Exception) -> bool:
    """Return true if another process's transaction was waited for in vain."""
    return isinstance(error, sqlite3.Error) and ("locked" in str(error) or "busy" in str(error))


def explain(error: Exception, path: Path) -> Exception:
    """Convert an error of SQLite, or of a text that it cannot store, into one with a remedy; keeps others."""
    text = str(error)
    if isinstance(error, UnicodeEncodeError):
        return StoreError(f"the store {path} cannot keep a text: {text}; it contains half of a surrogate pair")
    if not isinstance(error, sqlite3.Error):
        return error
    if is_locked(error):
        hint = "another process holds it in a long transaction: end that process, or wait and try again"
    elif "not a database" in text or "malformed" in text:
        hint = "it is no SQLite file, or a damaged one: choose another path, or move the file away"
    elif "unable to open" in text or "readonly" in text:
        hint = "it cannot be opened for writing: check the permissions of the file and its folder"
    elif "full" in text:
        hint = "the disk is full: make room and run again; what was acknowledged is safe"
    else:
        hint = "check the disk and the file with `sqlite3 FILE 'PRAGMA integrity_check'`"
    return StoreError(f"the store {path} failed with {text!r}; {hint}")


def _use_wal(connection: sqlite3.Connection, busy_s: float) -> None:
    """Switch to WAL, and wait for other processes, which SQLite does not do here."""
    end = time.monotonic() + busy_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(0.01)


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    if _version(connection, path) == CURRENT:
        return
    for name, function in {"created_at": _created_at, "record_key": record_key, "run_of": run_of}.items():
        connection.create_function(name, 1, function)
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = _version(connection, path)
        if 0 < version < CURRENT:  # another process may have made the tables meanwhile
            _LOG.warning("converting %s from layout %d to %d; a large file takes minutes", path, version, CURRENT)
        for number in range(version, CURRENT):
            for statement in MIGRATIONS[number]:
                connection.execute(statement)
            if number == _STATES_MOVE:
                _move_states(connection)
            if number == _STATISTICS:
                _fill_statistics(connection)
        connection.execute("CREATE TABLE IF NOT EXISTS agl_schema (version INTEGER NOT NULL)")
        connection.execute("DELETE FROM agl_schema")
        connection.execute("INSERT INTO agl_schema VALUES (?)", (CURRENT,))
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # a full disk ends it
            connection.execute("ROLLBACK")
        raise


def _move_states(connection: sqlite3.Connection) -> None:
    """Convert states of older layouts into documents."""
    states = dict(connection.execute("SELECT key, value FROM states"))
    found = older_documents(states, connection.execute("SELECT name, version FROM versions"))
    connection.executemany("INSERT INTO documents VALUES (?, ?)", found.items())
    connection.execute("DROP TABLE states")


def _fill_statistics(connection: sqlite3.Connection) -> None:
    """Count what attempts recorded and rollouts add up to."""
    reads, query = SQLiteReads(connection), RolloutQuery(limit=500)
    while page := reads.rollouts(query):
        attempts, shares = recount(page, reads.attempts, partial(_all_spans, reads))
        keys = [(encode(each), *_key_of(connection, each)) for each in attempts]
        connection.executemany("UPDATE attempts SET data = ? WHERE id = ?", keys)
        add_statistics(connection, shares)
        query = query.next(page[-1])


def _key_of(connection: sqlite3.Connection, attempt: Attempt) -> tuple[int]:
    (seq,) = connection.execute("SELECT seq FROM rollouts WHERE rollout_id = ?", (attempt.rollout_id,)).fetchone()
    return (seq << ATTEMPT_BITS | attempt.number,)


def _all_spans(reads: SQLiteReads, rollout_id: str, attempt_id: str) -> list[Span]:
    return reads.spans(rollout_id, attempt_id=attempt_id, limit=MAX_SEQUENCE)


def _created_at(data: bytes) -> float:
    return decode(data, Rollout).created_at


def _version(connection: sqlite3.Connection, path: Path) -> int:
    """Read the file's layout version, 0 for an empty file."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "agl_schema" not in tables:
        if tables:
            raise StoreError(
                f"{path} is a SQLite file of another program (it holds {sorted(tables)[:3]}); choose another path"
            )
        return 0
    (version,) = connection.execute("SELECT version FROM agl_schema").fetchone()
    if version > CURRENT:
        raise SchemaVersionError(
            f"{path} has layout version {version} and this agl-run reads up to {CURRENT}; "
            "upgrade it: pip install --upgrade agl-run"
        )
    return int(version)
