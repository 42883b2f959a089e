"""Opens connections, and reopens them for a limited time after the server went away."""

import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import psycopg
from psycopg import sql

from agl.errors import StoreError
from agl_store_postgres.faults import explain, is_passing
from agl_store_postgres.urls import DatabaseTarget

Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]

START_WAIT_S = 4.0
"""Seconds to wait for a server that never answered."""

RESTART_WAIT_S = 30.0
"""Seconds to wait for a server that has answered before and may be restarting."""

_DELAYS_S = (0.05, 0.2, 0.5, 1.0)

_SETTINGS: dict[str, str] = {
    "lock_timeout": "30s",
    "idle_in_transaction_session_timeout": "30s",  # a machine that freezes in a transaction must not block others
    "jit": "off",
    # Every statement has an index to use; statistics that are out of date must not mislead the planner.
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}


def connect(target: DatabaseTarget) -> Connection:
    """Open a connection that sees the store's schema and commits durably; psycopg's errors pass through."""
    connection = psycopg.connect(target.conninfo, autocommit=True)
    try:
        settings = {"search_path": sql.Identifier(target.schema).as_string(connection), **_SETTINGS}
        if connection.execute("SHOW synchronous_commit").fetchone() == ("off",):
            settings["synchronous_commit"] = "on"
        names, values = list(settings), list(settings.values())
        connection.execute(
            "SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS s(name, value)",
            (names, values),
        )
    except BaseException:
        connection.close()
        raise
    return connection


class ThreadConnection:
    """The connection of one thread of an open store, opened on demand.

    Args:
        stopping: Set when the store is closed; ends every wait for the server.
    """

    def __init__(
        self, target: DatabaseTarget, *, stopping: threading.Event, connection: Connection | None = None
    ) -> None:
        self._target = target
        self._stopping = stopping
        self._connection = connection

    @property
    def current(self) -> Connection | None:
        """The connection in its current state; ``None`` if there is none."""
        return self._connection

    def open(self) -> Connection:
        """Return the connection, opened on demand; raises :class:`StoreError` if the server stays unreachable."""
        if self._connection is None or self._connection.closed:
            self._connection = connect_in_time(
                lambda: connect(self._target), self._target, self._stopping, limit_s=RESTART_WAIT_S
            )
        return self._connection

    def drop(self) -> None:
        """Close the connection; the next :meth:`open` opens another one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def connect_in_time(
    make: Callable[[], Connection], target: DatabaseTarget, stopping: threading.Event, *, limit_s: float
) -> Connection:
    """Call ``make`` until the server can be reached, and return its result; other errors are raised at once."""
    end = time.monotonic() + limit_s
    delays = iter(_DELAYS_S)
    while True:
        try:
            return make()
        except psycopg.Error as error:
            if not is_passing(error) or time.monotonic() > end or stopping.wait(next(delays, _DELAYS_S[-1])):
                raise explain(error, target.shown) from error


def forked_error(target: DatabaseTarget) -> StoreError:
    """Return the error for a process that inherited the store by a fork."""
    return StoreError(
        f"the store {target.shown} was opened in another process; open it again in this one: its connections and "
        "threads do not survive a fork"
    )
