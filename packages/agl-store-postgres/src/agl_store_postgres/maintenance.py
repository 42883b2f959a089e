"""Gives back the space of removed rows, and measures how much the others take, on one server."""

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import psycopg
from psycopg import sql

from agl_store_postgres.connections import Connection, connect
from agl_store_postgres.faults import explain
from agl_store_postgres.urls import DatabaseTarget
from agl_store_sqlite.sql.compaction import Compaction

_OF_SCHEMA = (
    b"FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
    b"WHERE n.nspname = %s AND c.relkind IN ('r', 'p') AND NOT c.relispartition"
)
"""The tables, of which a partitioned one stands for its partitions."""
_TABLES = b"SELECT c.relname, c.relkind = 'p' " + _OF_SCHEMA
_COLUMNS = b"SELECT c.relname, a.attname " + _OF_SCHEMA.replace(
    b"WHERE", b"JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped WHERE"
)
_ROW_HEADER = 28
"""Bytes that PostgreSQL adds to each row."""
_SIZE = (
    b"SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint FROM pg_class c "
    b"JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relkind = 'r'"
)


def compact(target: DatabaseTarget, *, is_full: bool, sweep: Callable[[], object] | None = None) -> Compaction:
    """Vacuum every table, after a sweep; returns the sizes before and after both, with indexes.

    A partitioned table is not analysed, which would read many spans whatever was removed: no plan depends on it.
    """
    with connected(target) as db:
        before = _size(db, target)
        if sweep is not None:
            sweep()
        for table, is_partitioned in db.execute(_TABLES, (target.schema,)).fetchall():
            options = "(FULL, ANALYZE)" if is_full else "" if is_partitioned else "(ANALYZE)"
            db.execute(sql.SQL("VACUUM {} {}").format(sql.SQL(options), sql.Identifier(target.schema, table)))
        return Compaction(before=before, after=_size(db, target))


def table_bytes(target: DatabaseTarget) -> int:
    """Return the bytes of all tables, with indexes and the space of removed rows."""
    with connected(target) as db:
        return _size(db, target)


def row_bytes(target: DatabaseTarget) -> int:
    """Return the bytes of all rows, without indexes."""
    with connected(target) as db:
        columns: defaultdict[str, list[str]] = defaultdict(list)
        for table, column in db.execute(_COLUMNS, (target.schema,)).fetchall():
            columns[table].append(column)
        return sum(_bytes_of(db, sql.Identifier(target.schema, table), names) for table, names in columns.items())


def _bytes_of(db: Connection, table: sql.Identifier, columns: Sequence[str]) -> int:
    sizes = [sql.SQL("coalesce(pg_column_size({}), 0)").format(sql.Identifier(column)) for column in columns]
    query = sql.SQL("SELECT coalesce(sum({}), 0)::bigint + {} * count(*) FROM {}")
    ((size,),) = db.execute(query.format(sql.SQL(" + ").join(sizes), sql.Literal(_ROW_HEADER), table)).fetchall()
    return int(size)


def _size(db: Connection, target: DatabaseTarget) -> int:
    ((size,),) = db.execute(_SIZE, (target.schema,)).fetchall()
    return int(size)


@contextmanager
def connected(target: DatabaseTarget) -> Generator[Connection]:
    """Give a connection for a while; psycopg's errors are explained."""
    try:
        with connect(target) as db:
            yield db
    except psycopg.Error as error:
        raise explain(error, target.shown) from error
