"""Explains PostgreSQL's errors to the user, and distinguishes temporary from permanent errors."""

import re

import psycopg
from psycopg import errors

from agl.errors import StoreError

_UNREACHABLE = re.compile(
    "refused|starting up|shutting down|in recovery mode|closed the connection|connection is (closed|lost)|"
    "consuming input failed|terminating connection|timeout expired|timed out|reset by peer|not yet accepting|"
    "broken pipe|no such file|unreachable|"
    "cannot connect to server|server login has been failing|server conn crashed|query_wait_timeout"  # PgBouncer's
)
"""Messages about a server that cannot be reached for the moment."""

_HINTS: tuple[tuple[str, str], ...] = (
    (
        "password authentication failed|no password supplied",
        "correct user and password, in the URL, in PGPASSWORD or in ~/.pgpass",
    ),
    ("no pg_hba.conf entry", "the server's pg_hba.conf admits neither this user from here nor this way to connect"),
    (
        "translate host name|resolve host|name or service not known|nodename nor servname",
        "that host name cannot be resolved; correct the host in the URL",
    ),
    ("database .* does not exist", "create it (createdb NAME), or correct the last part of the URL's path"),
    ("role .* does not exist", "create it (createuser NAME), or correct the user in the URL"),
    (
        "permission denied",
        "let the owner of the database run: GRANT CREATE ON DATABASE ... TO ..., or, for existing tables, "
        "GRANT USAGE ON SCHEMA and ALL ON ALL TABLES and SEQUENCES IN SCHEMA to this user",
    ),
    (
        "too many clients|remaining connection slots|too many connections",
        "a store object takes up to 2 connections and its readers; raise max_connections, or set readers=1 in the URL",
    ),
    (
        "no space left|could not extend file",
        "the server's disk is full: free some space and run again; acknowledged writes are safe",
    ),
    (
        "read-only transaction",
        "that server is a replica or set to read only; name the primary, or several hosts with "
        "target_session_attrs=read-write",
    ),
    ("lock timeout", "another session holds a lock on the store's tables: end that session (see pg_stat_activity)"),
    ("index row", "ids, names and keys have at most 2,600 bytes in PostgreSQL: choose a shorter one"),
    (r"nul \(0x00\)", "PostgreSQL cannot store a NUL character in ids, names and keys: remove it"),
    ("surrogates not allowed", "that text is not valid Unicode: it holds a lone surrogate"),
    (r"\bssl\b", "see sslmode and sslrootcert in the URL, and the server's ssl settings"),
)


def is_lost(error: BaseException, connection: "psycopg.Connection[tuple[object, ...]] | None") -> bool:
    """Return true if the connection is gone, and with it the transaction."""
    if not isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return False
    return connection is None or connection.closed or connection.broken


def is_passing(error: psycopg.Error) -> bool:
    """Return true if the server may be reachable again soon."""
    return _UNREACHABLE.search(str(error).lower()) is not None


def is_collision(error: psycopg.Error) -> bool:
    """Return true if a concurrent transaction caused the error, so that a repetition may succeed.

    A check violation counts as well: it happens only to spans whose partition was dropped, and a repetition makes that
    partition again.
    """
    return isinstance(
        error,
        errors.DeadlockDetected | errors.SerializationFailure | errors.UniqueViolation | errors.CheckViolation,
    )


def is_shared(error: Exception) -> bool:
    """Return true if no single operation caused the error: a lock timed out, or the server went away."""
    if not isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return False
    return isinstance(error, errors.LockNotAvailable) or is_passing(error)


def explain(error: Exception, shown: str) -> Exception:
    """Turn an error of psycopg, or of text that it cannot send, into one with a remedy; return others unchanged."""
    if not isinstance(error, psycopg.Error | UnicodeEncodeError):
        return error
    text = " ".join(str(error).split()) or type(error).__name__
    lower = text.lower()
    for pattern, hint in _HINTS:
        if re.search(pattern, lower):
            return StoreError(f"the store {shown} failed: {text}; {hint}")
    if _UNREACHABLE.search(lower):
        return StoreError(
            f"the store {shown} cannot be reached: {text}; start the server, or correct host and port in the URL"
        )
    return StoreError(f"the store {shown} failed: {text}; the server's log may say more")
