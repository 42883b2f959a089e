"""Parses the store's URL into libpq's options and the store's own, and shows it without its password."""

from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, urlencode

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
"""Defaults with which a vanished server is noticed within a minute; the URL may override them."""

_EXAMPLE = "postgresql://USER@HOST:5432/DATABASE"


@dataclass(frozen=True, kw_only=True)
class DatabaseTarget:
    """The database and schema of a store.

    Attributes:
        conninfo: Connection string for libpq; may hold the password, and is never shown.
        shown: The URL for messages: user, host, port, database and schema.
        schema: The schema that holds the store's tables.
        readers: Largest number of connections for reads.
    """

    conninfo: str = field(repr=False)
    shown: str
    schema: str
    readers: int


def target_of(url: str) -> DatabaseTarget:
    """Parse the URL of a store.

    ``schema`` and ``readers`` are the store's own options; all others are passed to libpq unchanged.

    Raises:
        ConfigError: The URL is invalid or has an unknown option; the message never shows a password.
    """
    base, _, query = url.partition("?")
    scheme = base.partition("://")[0]
    if scheme not in ("postgresql", "postgres"):
        raise ConfigError(f"the store's URL begins with {scheme[:20]!r} and not with postgresql://; write {_EXAMPLE}")
    own = {"schema": DEFAULT_SCHEMA, "readers": str(READERS)}
    passed: list[tuple[str, str]] = []
    for key, value in parse_qsl(query, keep_blank_values=True):
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
    )


def _parts(url: str) -> dict[str, str]:
    try:
        return {key: str(value) for key, value in conninfo_to_dict(url).items() if value is not None}
    except psycopg.ProgrammingError as error:
        text = str(error).strip()
        reason = text if "://" not in text else "it cannot be read"  # libpq may repeat the URL with its password
        raise ConfigError(
            f"the URL of the PostgreSQL store is refused: {reason}; write {_EXAMPLE}, with %40 for an @ and %2F for "
            "a / in user and password; options are those of libpq, and schema and readers"
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
