"""Parses the store's URL into libpq's options and the store's own, and shows it without its password."""

from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, unquote, urlencode

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from agl.errors import ConfigError

DEFAULT_SCHEMA = "agl"
READERS = 4

CONNECTION_DEFAULTS: dict[str, str] = {
    "application_name": "agl",
    "connect_timeout": "10",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}
"""Default connection options, by which a server that vanishes is noticed within a minute; the URL may override them."""

PARTITIONS = ("hour", "day", "week", "month")
"""Units of time by which spans can be partitioned."""

SHARDED = "postgresql+shards"
"""The scheme of a store whose spans lie on several servers."""

_EXAMPLE = "postgresql://USER@HOST:5432/DATABASE"
_SHARDED_EXAMPLE = "postgresql+shards://USER@CONTROL/DATABASE?shards=postgresql://USER@ONE/DATABASE,postgresql://..."


@dataclass(frozen=True, kw_only=True)
class DatabaseTarget:
    """The database and schema of a store.

    Attributes:
        conninfo: Connection string for libpq; may hold the password, and is never shown.
        shown: The URL for messages: user, host, port, database and schema.
        schema: The schema that holds the store's tables.
        readers: Largest number of connections for reads.
        is_pooled: Whether a pooler in between gives every transaction another session of the server.
        partition: The unit of time by which spans are to be partitioned; empty to leave them as they are.
    """

    conninfo: str = field(repr=False)
    shown: str
    schema: str
    readers: int
    is_pooled: bool = False
    partition: str = ""


@dataclass(frozen=True, kw_only=True)
class ShardedTarget:
    """The databases of a store whose spans lie on several servers.

    Attributes:
        control: The database of rollouts, attempts, changes and versions.
        shards: The databases of the spans, in the order of the URL, which has no meaning.
        shown: The URL for messages, without passwords.
    """

    control: DatabaseTarget
    shards: tuple[DatabaseTarget, ...]
    shown: str


def sharded_target_of(url: str) -> ShardedTarget:
    """Parse the URL of a store in shards.

    The option ``shards`` has the URLs of the shards' databases, separated by commas. A shard's URL that contains a
    ``&`` or a comma must be percent-encoded as a whole; it is decoded because it contains no ``://``.

    Raises:
        ConfigError: The URL, or that of a shard, is invalid; the message never shows a password.
    """
    base, _, query = url.partition("?")
    scheme, _, rest = base.partition("://")
    if scheme != SHARDED:
        raise ConfigError(f"the store's URL begins with {scheme[:20]!r} and not with {SHARDED}://")
    options = query.split("&") if query else []
    lists = [option.partition("=")[2] for option in options if option.startswith("shards=")]
    if len(lists) != 1 or not lists[0]:
        raise ConfigError(f"the URL of a store in shards names them once, as in {_SHARDED_EXAMPLE}")
    others = "&".join(option for option in options if not option.startswith("shards="))
    control = target_of(f"postgresql://{rest}?{others}")
    shards = tuple(_shard_of(text, number) for number, text in enumerate(lists[0].split(","), start=1))
    shown = control.shown.replace("postgresql://", f"{SHARDED}://", 1)
    named = ",".join(shard.shown for shard in shards)
    return ShardedTarget(control=control, shards=shards, shown=f"{shown}{'&' if '?' in shown else '?'}shards={named}")


def _shard_of(text: str, number: int) -> DatabaseTarget:
    """Parse the URL of a shard; ``number`` is its position in the list, from 1."""
    url = text if "://" in text else unquote(text)
    try:
        for option in url.partition("?")[2].split("&"):
            if (name := option.partition("=")[0]) in ("readers", "partition"):
                raise ConfigError(f"{name} is an option of the whole store; write it behind the control server's URL")
        return target_of(url)
    except ConfigError as error:
        raise ConfigError(
            f"shard {number} in the store's URL is refused: {error}; a shard's URL that has a & or a comma of its own "
            "is percent-encoded as a whole (urllib.parse.quote(url, safe=''))"
        ) from None


def target_of(url: str) -> DatabaseTarget:
    """Parse the URL of a store.

    ``schema``, ``readers``, ``pool`` and ``partition`` are the store's own options; all others are passed to libpq
    unchanged.

    Raises:
        ConfigError: The URL is invalid or has an unknown option; the message never shows a password.
    """
    base, _, query = url.partition("?")
    scheme = base.partition("://")[0]
    if scheme not in ("postgresql", "postgres"):
        raise ConfigError(f"the store's URL begins with {scheme[:20]!r} and not with postgresql://; write {_EXAMPLE}")
    own = {"schema": DEFAULT_SCHEMA, "readers": str(READERS), "pool": "session", "partition": ""}
    passed: list[tuple[str, str]] = []
    for key, value in parse_qsl(query.replace("+", "%2B"), keep_blank_values=True):  # to libpq a + is no space
        if key in own:
            own[key] = value
        else:
            passed.append((key, value))
    parts = _parts(f"{base}?{urlencode(passed, quote_via=quote)}")
    conninfo = make_conninfo("", **{**CONNECTION_DEFAULTS, **parts})
    return DatabaseTarget(
        conninfo=conninfo,
        shown=_shown(parts, own["schema"]),
        schema=_schema(own["schema"]),
        readers=_count(own["readers"]),
        is_pooled=_is_pooled(own["pool"]),
        partition=_partition(own["partition"]),
    )


def _parts(url: str) -> dict[str, str]:
    try:
        return {key: str(value) for key, value in conninfo_to_dict(url).items() if value is not None}
    except psycopg.ProgrammingError as error:
        text = str(error).strip()
        reason = text if "://" not in text else "it cannot be read"  # libpq may repeat the URL with its password
        raise ConfigError(
            f"the URL of the PostgreSQL store is refused: {reason}; write {_EXAMPLE}, with %40 for an @ and %2F for "
            "a / in user and password; options are those of libpq, and schema, readers, pool and partition"
        ) from None


def _shown(parts: dict[str, str], schema: str) -> str:
    user = f"{parts['user']}@" if "user" in parts else ""
    port = f":{parts['port']}" if "port" in parts else ""
    suffix = "" if schema == DEFAULT_SCHEMA else f"?schema={schema}"
    return f"postgresql://{user}{parts.get('host', '')}{port}/{parts.get('dbname', '')}{suffix}"


def _schema(name: str) -> str:
    if not name or len(name.encode()) > 63 or "\x00" in name or name.startswith("pg_"):
        raise ConfigError(
            f"schema = {name[:80]!r} in the store's URL is not a valid schema name; "
            "use 1 to 63 bytes, and do not begin with pg_"
        )
    return name


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise ConfigError(f"readers = {text[:20]!r} in the store's URL must be a number from 1 to 64")
    return int(text)


def _partition(unit: str) -> str:
    if unit and unit not in PARTITIONS:
        raise ConfigError(f"partition = {unit[:20]!r} in the store's URL must be one of {', '.join(PARTITIONS)}")
    return unit


def _is_pooled(pool: str) -> bool:
    if pool not in ("session", "transaction"):
        raise ConfigError(
            f"pool = {pool[:20]!r} in the store's URL must be session, or transaction for a pooler that gives every "
            "transaction another session of the server, such as PgBouncer with pool_mode = transaction"
        )
    return pool == "transaction"
