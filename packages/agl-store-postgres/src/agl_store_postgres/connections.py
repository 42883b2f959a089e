"""Opens connections to a database, also through a pooler."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import psycopg
from psycopg import sql
from psycopg.abc import Params, Query
from psycopg.pq import TransactionStatus

from agl_store_postgres.faults import explain, is_lost, is_passing
from agl_store_postgres.urls import DatabaseTarget
from agl_store_sqlite.sql.servers import ServerAccess

Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]

_SETTINGS: dict[str, str] = {
    "lock_timeout": "30s",
    "idle_in_transaction_session_timeout": "30s",  # a machine that freezes in a transaction must not block others
    "jit": "off",
    # Every statement has an index to use; statistics that are out of date must not mislead the planner.
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}


_SET = "SELECT set_config(name, value, %s) FROM unnest(%s::text[], %s::text[]) AS s(name, value)"


class PooledConnection(psycopg.Connection[tuple[Any, ...]]):
    """A connection to a pooler that may run every transaction in another session of the server.

    Settings that other connections make once per session are made in every transaction. A statement outside a
    transaction gets a new transaction, except for VACUUM, which cannot run in one. No statement is prepared, because
    the next session would not know it.
    """

    settings: Mapping[str, str] = {}

    def execute(
        self, query: Query, params: Params | None = None, *, prepare: bool | None = None, binary: bool = False
    ) -> psycopg.Cursor[tuple[Any, ...]]:
        """Execute a statement; first make the settings, if it begins a transaction or runs outside of one."""
        run: Callable[..., psycopg.Cursor[tuple[Any, ...]]] = super().execute
        if self.info.transaction_status == TransactionStatus.IDLE:
            text = _text_of(query, self)
            if text.startswith("BEGIN"):
                cursor = run(query, params, prepare=prepare, binary=binary)
                self._use_settings()
                return cursor
            if not text.startswith("VACUUM"):
                with self.transaction():
                    return run(query, params, prepare=prepare, binary=binary)
        return run(query, params, prepare=prepare, binary=binary)

    @contextmanager
    def transaction(
        self, savepoint_name: str | None = None, force_rollback: bool = False
    ) -> Generator[psycopg.Transaction]:
        """Open a transaction, and make the settings in it."""
        with super().transaction(savepoint_name, force_rollback) as transaction:
            self._use_settings()
            yield transaction

    def _use_settings(self) -> None:
        if self.settings:
            super().execute(_SET, (True, list(self.settings), list(self.settings.values())))


def connect(target: DatabaseTarget) -> Connection:
    """Open a connection that sees the store's schema and commits durably; psycopg's errors pass through."""
    kind = PooledConnection if target.is_pooled else psycopg.Connection
    connection = kind.connect(target.conninfo, autocommit=True, prepare_threshold=None if target.is_pooled else 5)
    try:
        settings = {"search_path": sql.Identifier(target.schema).as_string(connection), **_SETTINGS}
        if connection.execute("SHOW synchronous_commit").fetchone() == ("off",):
            settings["synchronous_commit"] = "on"
        if isinstance(connection, PooledConnection):
            connection.settings = settings
        else:
            connection.execute(_SET, (False, list(settings), list(settings.values())))
    except BaseException:
        connection.close()
        raise
    return connection


def rolled_back(db: Connection) -> bool:
    """Roll back, and drop psycopg's failed prepared statements with it; returns false if the connection is gone."""
    try:
        db.rollback()
    except psycopg.Error:
        return False
    return True


def _text_of(query: Query, connection: Connection) -> str:
    """Return the text of a statement."""
    if isinstance(query, sql.Composable):
        return query.as_string(connection)
    return query.decode() if isinstance(query, bytes) else str(query)


def access_of(target: DatabaseTarget) -> ServerAccess[Connection]:
    """Return the access to a database: how to connect to it, and how to interpret psycopg's errors."""
    return ServerAccess(
        shown=target.shown,
        connect=partial(connect, target),
        errors=(psycopg.Error,),
        is_passing=is_passing,
        is_lost=is_lost,
        is_usable=lambda _, db: rolled_back(db),
        explain=explain,
    )
