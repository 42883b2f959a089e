"""Lays out the partitioned table of spans, and the functions that count periods and make and drop partitions.

A store becomes partitioned when its URL first has the option; its present spans become the first partition. The
functions belong to the owner of the tables, because only the owner may make and drop partitions. Other users of the
store need the right to call the functions.
"""

from collections.abc import Iterable

from psycopg import sql

from agl.errors import ConfigError, SchemaVersionError
from agl_store_postgres.connections import Connection
from agl_store_postgres.layout import LOCK, has_table
from agl_store_postgres.partitions import KEY_BITS, PERIOD, PERIOD_BITS, SEQUENCE
from agl_store_postgres.urls import DatabaseTarget

VERSION = 1
"""Version of this module's functions and of the table ``partitioning``."""

_LAST_PERIOD = (1 << 63 - KEY_BITS) - 2

_PARTITION_SPANS = (
    "ALTER TABLE spans RENAME CONSTRAINT spans_pkey TO spans_0_pkey",
    "ALTER TABLE spans RENAME CONSTRAINT spans_attempt_span_id_key TO spans_0_attempt_span_id_key",
    "ALTER TABLE spans RENAME TO spans_0",
    'CREATE TABLE spans (attempt bigint NOT NULL, sequence int NOT NULL, span_id text COLLATE "C" NOT NULL, '
    "data bytea NOT NULL, PRIMARY KEY (attempt, sequence), UNIQUE (attempt, span_id)) PARTITION BY RANGE (attempt)",
    "ALTER TABLE spans ALTER COLUMN data SET STORAGE EXTERNAL",
    f"ALTER TABLE spans ATTACH PARTITION spans_0 FOR VALUES FROM (MINVALUE) TO ({1 << KEY_BITS})",
)
"""Makes the table of spans the first partition; its rows stay where they are."""

_MAKE = f"""CREATE FUNCTION agl_make_partition(p int) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
SET search_path = {{schema}}, pg_temp AS $$ BEGIN
    PERFORM pg_advisory_xact_lock('spans'::regclass::oid::bigint);
    IF to_regclass('spans_' || p) IS NOT NULL THEN RETURN; END IF;
    EXECUTE format('CREATE TABLE spans_%s (LIKE spans INCLUDING ALL) WITH (toast_tuple_target = 8160)', p);
    -- attached, because making it as a partition at once would wait for everyone who reads or writes spans
    EXECUTE format('ALTER TABLE spans ATTACH PARTITION spans_%s FOR VALUES FROM (%s) TO (%s)',
        p, p::bigint << {KEY_BITS}, (p::bigint + 1) << {KEY_BITS});
END $$"""

_DROP = """CREATE FUNCTION agl_drop_partition(p int) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER
SET search_path = {schema}, pg_temp SET lock_timeout = '200ms' AS $$ BEGIN
    EXECUTE format('DROP TABLE IF EXISTS spans_%s', p);
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END $$"""
"""Creates the function that drops a partition.

While the function waits for a lock, other transactions wait for it. So it soon gives up if a transaction reads spans.
"""

_NOW = "clock_timestamp() AT TIME ZONE 'UTC'"

_NUMBERS = f"""CREATE FUNCTION agl_numbers(n int) RETURNS SETOF bigint LANGUAGE plpgsql SECURITY DEFINER
SET search_path = {{schema}}, pg_temp AS $$ DECLARE period bigint; drawn bigint[]; BEGIN
    IF EXISTS (SELECT FROM partitioning WHERE date_trunc(unit, began_at) <> date_trunc(unit, {_NOW})) THEN
        -- one transaction begins the period; those who wait for it here find that it has begun
        UPDATE partitioning SET began_at = {_NOW} WHERE date_trunc(unit, began_at) <> date_trunc(unit, {_NOW});
        IF FOUND AND {PERIOD} < {_LAST_PERIOD} THEN
            PERFORM setval({SEQUENCE}, ({PERIOD} + 1) << {PERIOD_BITS});
        END IF;
    END IF;
    LOOP
        period := {PERIOD};
        PERFORM pg_advisory_xact_lock_shared('partitioning'::regclass::oid::int, period::int);
        drawn := ARRAY(SELECT nextval({SEQUENCE}) FROM generate_series(1, n));
        EXIT WHEN drawn[n] >> {PERIOD_BITS} = period;
    END LOOP;
    RETURN QUERY SELECT unnest(drawn);
END $$"""
"""Creates the function that draws numbers for new rollouts.

While the transaction lasts, the function's lock keeps the numbers' period from being dropped.
"""

_CONTROL = (
    "CREATE TABLE partitioning (version int NOT NULL, unit text NOT NULL, began_at timestamp NOT NULL)",
    "CREATE TABLE IF NOT EXISTS removals (seq bigint PRIMARY KEY, shard smallint NOT NULL)",
    _NUMBERS,
    "REVOKE ALL ON FUNCTION agl_numbers FROM PUBLIC",
)
_ADD = f"INSERT INTO partitioning VALUES (%s, %s, {_NOW})".encode()
_BEGIN_FIRST = f"SELECT setval({SEQUENCE}, ({PERIOD} + 1) << {PERIOD_BITS})".encode()
_SPANS = (
    _MAKE,
    _DROP,
    "REVOKE ALL ON FUNCTION agl_make_partition, agl_drop_partition FROM PUBLIC",
)

_IS_PARTITIONED = b"SELECT relkind = 'p' FROM pg_class WHERE oid = 'spans'::regclass"


def prepare_control(db: Connection, target: DatabaseTarget) -> bool:
    """Set up partitioning if the URL asks for it; returns true if the store's spans are partitioned.

    Raises:
        ConfigError: The URL names another period than the store has.
        SchemaVersionError: A newer release partitioned the store.
    """
    if not has_table(db, target, "partitioning"):
        if not target.partition:
            return False
        with db.transaction():
            db.execute(LOCK, (target.schema,))
            if not has_table(db, target, "partitioning"):
                _run(db, target, _CONTROL)
                db.execute(_ADD, (VERSION, target.partition))
                db.execute(_BEGIN_FIRST)
    ((version, unit),) = db.execute("SELECT version, unit FROM partitioning").fetchall()
    if version > VERSION:
        raise SchemaVersionError(
            f"the partitions of {target.shown} have version {version} and this agl-store-postgres reads up to "
            f"{VERSION}; upgrade it: pip install --upgrade agl-store-postgres"
        )
    if target.partition not in ("", unit):
        raise ConfigError(
            f"partition = {target.partition!r} in the store's URL, but {target.shown} is partitioned by {unit}; write "
            f"partition={unit}, or leave it out"
        )
    return True


def prepare_spans(db: Connection, target: DatabaseTarget) -> None:
    """Partition the table of spans on one server if it is not; its present spans become the first partition."""
    if db.execute(_IS_PARTITIONED).fetchone() == (True,):
        return
    with db.transaction():
        db.execute(LOCK, (target.schema,))
        if db.execute(_IS_PARTITIONED).fetchone() != (True,):
            _run(db, target, (*_PARTITION_SPANS, *_SPANS))


def _run(db: Connection, target: DatabaseTarget, statements: Iterable[str]) -> None:
    schema = sql.Identifier(target.schema).as_string(db)
    for statement in statements:
        db.execute(statement.replace("{schema}", schema).encode())
