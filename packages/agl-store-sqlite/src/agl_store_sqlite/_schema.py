"""The layout of the SQLite file: opens it, and migrates older layouts.

Rollouts and attempts are numbered as in :mod:`agl_store_sqlite.sql`. Spans have the key ``attempt << 24 | sequence``,
so a rollout is removed by removing ranges of keys. A rollout's ``stage`` is ``open`` while it is queued or running, and
then its final status. The indexes that list rollouts have the stage, so that a claim does not change them; running
rollouts are found through their attempts.
"""

import logging
import re
import sqlite3
import time
from pathlib import Path

from agl.errors import SchemaVersionError, StoreError

SETTINGS = (
    "page_size = 4096",
    "synchronous = FULL",
    "temp_store = MEMORY",
    "wal_autocheckpoint = 4000",
    "cache_size = -16000",
)

READER_SETTINGS = ("query_only = ON", "cache_size = -4000")
"""Additional settings of connections that only read. Their caches are smaller, because a store has several of them."""

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE rollouts (
            seq INTEGER PRIMARY KEY AUTOINCREMENT, rollout_id TEXT NOT NULL UNIQUE, experiment TEXT NOT NULL,
            mode TEXT NOT NULL, group_id TEXT NOT NULL, status TEXT NOT NULL, stage TEXT NOT NULL,
            attempts INTEGER NOT NULL, attempt INTEGER, started_at REAL NOT NULL, finished_at REAL NOT NULL,
            data BLOB NOT NULL, failures INTEGER NOT NULL DEFAULT 0, losses INTEGER NOT NULL DEFAULT 0,
            created_at REAL NOT NULL DEFAULT 0.0)""",
        """CREATE TABLE attempts (
            id INTEGER PRIMARY KEY, status TEXT NOT NULL, claim_id TEXT NOT NULL, deadline REAL NOT NULL,
            data BLOB NOT NULL)""",
        "CREATE TABLE spans (key INTEGER PRIMARY KEY, span_id TEXT NOT NULL, data BLOB NOT NULL)",
        """CREATE TABLE changes (
            cursor INTEGER PRIMARY KEY, attempt INTEGER, kind TEXT NOT NULL, status TEXT NOT NULL,
            name TEXT)""",
        """CREATE TABLE versions (
            seq INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, version TEXT NOT NULL, data BLOB NOT NULL,
            UNIQUE (name, version))""",
        "CREATE TABLE documents (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
        """CREATE TABLE metrics (
            experiment TEXT, run INTEGER, algorithm TEXT, step INTEGER, name TEXT, experiment_step INTEGER, value REAL,
            time REAL, PRIMARY KEY (experiment, run, algorithm, step, name)) WITHOUT ROWID""",
        """CREATE TABLE statistics (
            experiment TEXT, algorithm TEXT, step INTEGER, mode TEXT, succeeded INTEGER, failed INTEGER,
            cancelled INTEGER, seconds REAL, calls INTEGER, prompt_tokens INTEGER, response_tokens INTEGER,
            rewards INTEGER, mean REAL, squares REAL, PRIMARY KEY (experiment, algorithm, step, mode)) WITHOUT ROWID""",
        "CREATE INDEX rollouts_queue ON rollouts (experiment, seq) WHERE status = 'queued'",
        "CREATE INDEX rollouts_listed ON rollouts (experiment, mode, stage, rollout_id)",
        "CREATE INDEX rollouts_created ON rollouts (experiment, mode, stage, created_at, rollout_id)",
        "CREATE INDEX rollouts_finished ON rollouts (experiment, mode, stage, finished_at, rollout_id)",
        "CREATE INDEX rollouts_grouped ON rollouts (group_id, rollout_id) WHERE group_id <> ''",
        "CREATE INDEX attempts_due ON attempts (deadline) WHERE status = 'running'",
        "CREATE INDEX attempts_claimed ON attempts (claim_id) WHERE status = 'running' AND claim_id <> ''",
        "CREATE UNIQUE INDEX spans_by_id ON spans (key >> 24, span_id)",
        "CREATE INDEX changes_by_attempt ON changes (attempt) WHERE attempt IS NOT NULL",
        "CREATE INDEX versions_by_name ON versions (name, seq)",
        "CREATE INDEX metrics_by_name ON metrics (experiment, name, run, algorithm, step)",
    ),
)
"""Statements that migrate a file from version N to N + 1; a new file runs all of them."""

CURRENT = len(MIGRATIONS)

_LOG = logging.getLogger("agl_store_sqlite")

_TAIL = re.compile(r"[?#][^/\\]*$|\?\w+=")
"""Matches options or a fragment at the end of a URL, but not the same characters in the names of folders."""


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
        StoreError: The file cannot be created, read or written, or is not a store.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"the folder {path.parent} cannot be created: {error}; choose a folder you own") from error
    journal = path.with_name(f"{path.name}-journal")
    if journal.exists() and not journal.is_file():  # SQLite would wait for the writer of a pipe
        raise StoreError(f"{journal} is not a file of the store; remove it")
    connection: sqlite3.Connection | None = None
    try:
        connection = connect(path, busy_s=busy_s)
        # SQLite does not wait in this statement
        _try(connection, "PRAGMA journal_mode = WAL", busy_s=busy_s, every_s=0.01)
        _migrate(connection, path)
    except BaseException as error:
        if connection is not None:
            connection.close()
        if isinstance(error, sqlite3.Error):
            raise explain(error, path) from error
        raise
    return connection


def is_locked(error: Exception) -> bool:
    """Return true if the wait for another process's transaction timed out."""
    return isinstance(error, sqlite3.Error) and ("locked" in str(error) or "busy" in str(error))


def explain(error: Exception, path: Path) -> Exception:
    """Convert an error of SQLite, or a :class:`UnicodeEncodeError`, into one with a remedy; return others unchanged."""
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


def begin(connection: sqlite3.Connection, *, busy_s: float) -> None:
    """Begin a transaction that writes; while another process has one, look every millisecond.

    SQLite's own looks are up to 0.1 s apart, and between two of them a busy process begins many transactions.
    """
    connection.execute("PRAGMA busy_timeout = 0")
    try:
        _try(connection, "BEGIN IMMEDIATE", busy_s=busy_s, every_s=0.001)
    finally:
        connection.execute(f"PRAGMA busy_timeout = {busy_s * 1e3:.0f}")


def _try(connection: sqlite3.Connection, statement: str, *, busy_s: float, every_s: float) -> None:
    """Execute a statement, again and again while other processes hold the file."""
    end = time.monotonic() + busy_s
    while True:
        try:
            connection.execute(statement)
            return
        except sqlite3.OperationalError as error:
            if not is_locked(error) or time.monotonic() > end:
                raise
            time.sleep(every_s)


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    if _version(connection, path) == CURRENT:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = _version(connection, path)
        if 0 < version < CURRENT:  # another process may have made the tables meanwhile
            _LOG.warning("converting %s from layout %d to %d; a large file takes minutes", path, version, CURRENT)
        for number in range(version, CURRENT):
            for statement in MIGRATIONS[number]:
                connection.execute(statement)
        connection.execute("CREATE TABLE IF NOT EXISTS agl_schema (version INTEGER NOT NULL)")
        connection.execute("DELETE FROM agl_schema")
        connection.execute("INSERT INTO agl_schema VALUES (?)", (CURRENT,))
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # a full disk ends the transaction
            connection.execute("ROLLBACK")
        raise


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
