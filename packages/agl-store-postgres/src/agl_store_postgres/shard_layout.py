"""Lays out the tables of a store in shards: the shards' tables, and additional tables on the control server.

The control server stores the shard of every rollout, and the last acknowledged sequence of every attempt. Spans on a
shard beyond that sequence belong to a write that was never finished; they are not shown, and the next write replaces
them. The table ``removals`` lists removed rollouts until the shard has removed the spans.
"""

import uuid
from collections.abc import Sequence

import psycopg
from psycopg import sql

from agl.errors import ConfigError, SchemaVersionError, StoreError
from agl_store_postgres.connections import Connection, connect
from agl_store_postgres.layout import LOCK, SPANS, check_encoding, has_table
from agl_store_postgres.placing import Shard
from agl_store_postgres.urls import DatabaseTarget, ShardedTarget

CURRENT = 1
"""Version of a shard's layout."""

_CONTROL = (
    b"CREATE TABLE shards (id smallint PRIMARY KEY, identity text NOT NULL UNIQUE, address text NOT NULL)",
    b"ALTER TABLE rollouts ADD COLUMN shard smallint NOT NULL DEFAULT 0",
    b"CREATE INDEX rollouts_on_shard ON rollouts (shard, seq)",
    b"CREATE TABLE span_marks (attempt bigint PRIMARY KEY, last int NOT NULL) WITH (fillfactor = 70)",
    b"CREATE TABLE removals (seq bigint PRIMARY KEY, shard smallint NOT NULL)",
)
_SHARD = (
    b"CREATE TABLE agl_shard (version int NOT NULL, store text NOT NULL, identity text NOT NULL)",
    *SPANS,
)
_ADD = b"INSERT INTO shards VALUES ((SELECT coalesce(max(id), 0) + 1 FROM shards), %s, %s)"
_SHARDS = b"SELECT id, identity, address FROM shards WHERE id > 0 ORDER BY id"
_HELD = b"SELECT id, address FROM shards s WHERE id > 0 AND EXISTS (SELECT 1 FROM rollouts r WHERE r.shard = s.id)"


def prepare_shards(control: Connection, shards: Sequence[Connection], target: ShardedTarget) -> list[Shard]:
    """Create missing tables on the control server and the shards, and check that the servers belong to one store.

    Several processes may call it at once: one works, the others wait.

    Args:
        control: Has the tables of a store already.
        shards: Connections to the databases of ``target.shards``.

    Raises:
        ConfigError: Two URLs name one database, or the control server's, or a shard that holds rollouts is not named.
        StoreError: A schema holds something else, or a shard belongs to another store.
        SchemaVersionError: A newer release wrote a shard.
    """
    with control.transaction():
        control.execute(LOCK, (target.control.schema,))
        store = _store_identity(control, target)
        found = [_identity(db, shard, store) for db, shard in zip(shards, target.shards, strict=True)]
        _refuse_twins(found, target.shards)
        known = {identity: (number, address) for number, identity, address in control.execute(_SHARDS).fetchall()}
        for identity, shard in zip(found, target.shards, strict=True):
            if identity not in known:
                control.execute(_ADD, (identity, shard.shown))
            elif known[identity][1] != shard.shown:
                control.execute(b"UPDATE shards SET address = %s WHERE identity = %s", (shard.shown, identity))
        numbers = {identity: number for number, identity, _ in control.execute(_SHARDS).fetchall()}
        named = {numbers[identity] for identity in found}
        if set(numbers.values()) - named:
            _refuse_missing(control, named, target)
    return [
        Shard(number=numbers[identity], identity=identity, store=store, target=shard)
        for identity, shard in zip(found, target.shards, strict=True)
    ]


def connect_shard(shard: Shard) -> Connection:
    """Open a connection to a shard; psycopg's errors pass through.

    Raises:
        StoreError: Another database answers at its address.
    """
    db = connect(shard.target)
    try:
        row = db.execute("SELECT store, identity FROM agl_shard").fetchone()
    except psycopg.errors.UndefinedTable:
        row = None
    except BaseException:
        db.close()
        raise
    if row != (shard.store, shard.identity):
        db.close()
        raise StoreError(
            f"{shard.target.shown} is not shard {shard.number} of this store any more: another database answers there; "
            "correct the address, or restore that shard's backup"
        )
    return db


def _store_identity(control: Connection, target: ShardedTarget) -> str:
    """Return the identity of the control server's store; an empty store is made a store in shards first."""
    if not has_table(control, target.control, "shards"):
        if control.execute("SELECT 1 FROM rollouts LIMIT 1").fetchone():
            shown = target.control.shown
            raise StoreError(
                f"{shown} holds rollouts with their spans, and cannot become the control server of a store in shards; "
                f"name an empty database or ?schema=NAME, and copy them: agl data copy {shown} {target.shown}"
            )
        for statement in _CONTROL:
            control.execute(statement)
        control.execute(b"INSERT INTO shards VALUES (0, %s, '')", (uuid.uuid4().hex,))
    ((identity,),) = control.execute("SELECT identity FROM shards WHERE id = 0").fetchall()
    return str(identity)


def _identity(db: Connection, target: DatabaseTarget, store: str) -> str:
    """Return the identity of a shard; if the schema is empty, the tables are made first."""
    check_encoding(db, target)
    with db.transaction():
        db.execute(LOCK, (f"shard {target.schema}",))
        if not has_table(db, target, "agl_shard"):
            _create(db, target, store)
        ((version, owner, identity),) = db.execute("SELECT version, store, identity FROM agl_shard").fetchall()
    if version > CURRENT:
        raise SchemaVersionError(
            f"the shard {target.shown} has layout version {version} and this agl-store-postgres reads up to {CURRENT}; "
            "upgrade it: pip install --upgrade agl-store-postgres"
        )
    if owner != store:
        raise StoreError(
            f"{target.shown} is a shard of another store; name a database of this store's own, or ?schema=NAME for a "
            "schema of its own"
        )
    return str(identity)


def _create(db: Connection, target: DatabaseTarget, store: str) -> None:
    rows = db.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (target.schema,)).fetchall()
    tables = {str(name) for (name,) in rows}
    if "agl_schema" in tables:
        raise StoreError(
            f"{target.shown} holds a store of its own and cannot be a shard; name another database, or another schema "
            "in it with ?schema=NAME"
        )
    if tables:
        raise StoreError(
            f"schema {target.schema!r} of {target.shown} belongs to another program (it holds {sorted(tables)[:3]}); "
            "choose another one with ?schema=NAME in the shard's URL"
        )
    db.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(target.schema)))
    for statement in _SHARD:
        db.execute(statement)
    db.execute("INSERT INTO agl_shard VALUES (%s, %s, %s)", (CURRENT, store, uuid.uuid4().hex))


def _refuse_twins(identities: Sequence[str], targets: Sequence[DatabaseTarget]) -> None:
    seen: dict[str, str] = {}
    for identity, target in zip(identities, targets, strict=True):
        if identity in seen:
            raise ConfigError(
                f"the store's URL names one shard twice, as {seen[identity]} and {target.shown}; remove one of them"
            )
        seen[identity] = target.shown


def _refuse_missing(control: Connection, named: set[int], target: ShardedTarget) -> None:
    """Raise :class:`ConfigError` for a shard that holds rollouts and that the URL does not name."""
    missing = [(number, address) for number, address in control.execute(_HELD).fetchall() if number not in named]
    if missing:
        texts = " and ".join(f"shard {number}, last at {address}," for number, address in missing)
        raise ConfigError(
            f"the URL of the store {target.shown} does not name {texts} which holds rollouts; add it to shards=, or "
            "remove its rollouts first"
        )
