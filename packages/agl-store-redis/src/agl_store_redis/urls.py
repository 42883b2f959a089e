"""Parses the store's URL into the server's address and the store's options, and shows it without its password."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast, get_args
from urllib.parse import parse_qsl, unquote, urlsplit

from agl.errors import ConfigError

DEFAULT_PREFIX = "agl"
READERS = 4
PORT = 6379

Durability: TypeAlias = Literal["always", "second", "none"]
"""The largest loss in a crash of the server: nothing acknowledged, about its last second, or anything."""

_EXAMPLE = "redis://HOST:6379/0?prefix=agl"
_SCHEMES = {"redis": False, "valkey": False, "rediss": True, "valkeys": True}
_FILES = {"ca": "ssl_ca_certs", "cert": "ssl_certfile", "key": "ssl_keyfile"}
_OPTIONS = ("prefix", "durability", "readers", *_FILES)


@dataclass(frozen=True, kw_only=True)
class ServerTarget:
    """The server and the prefix of a store.

    Attributes:
        address: Host, port, database, user, password and TLS, as redis-py takes them; never shown.
        shown: The URL for messages: host, port, database, and the options of the store that are not the default.
        base: The prefix of all keys. It is a hash tag, so that all keys are in one slot of a Cluster.
        durability: What the server's configuration must promise.
        readers: Largest number of connections for reads.
    """

    address: Mapping[str, Any] = field(repr=False)
    shown: str
    base: str
    durability: Durability
    readers: int


def target_of(url: str) -> ServerTarget:
    """Parse the URL of a store.

    Raises:
        ConfigError: The URL is invalid or has an unknown option; the message never shows a password.
    """
    scheme = url.partition("://")[0]
    if scheme not in _SCHEMES:
        raise ConfigError(f"the store's URL begins with {scheme[:20]!r} and not with redis://; write {_EXAMPLE}")
    if "#" in url:
        raise ConfigError("the URL of the Redis store has a #, which would end it there; write %23 for it")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "localhost", parts.port or PORT
        query = parse_qsl(parts.query.replace("+", "%2B"), keep_blank_values=True)
    except ValueError:  # its text may repeat a password that holds a colon or a slash
        raise ConfigError(
            f"the URL of the Redis store cannot be read; write {_EXAMPLE}, with %40 for an @, %3A for a : and %2F for "
            "a / in user and password"
        ) from None
    _check_options([name for name, _ in query])
    options = dict(query)
    database = _number("the database, the last part of the path,", parts.path.strip("/") or "0", 0, 1 << 20)
    prefix = _prefix(options.get("prefix", DEFAULT_PREFIX))
    durability = options.get("durability", "always")
    if durability not in get_args(Durability):
        raise ConfigError(f"durability = {durability[:20]!r} in the store's URL must be always, second or none")
    address: dict[str, Any] = {"host": host, "port": port, "db": database, "ssl": _SCHEMES[scheme]}
    address |= {"username": unquote(parts.username or "") or None, "password": unquote(parts.password or "") or None}
    address |= {_FILES[name]: path for name, path in options.items() if name in _FILES}
    if any(name in options for name in _FILES) and not _SCHEMES[scheme]:
        raise ConfigError(f"ca, cert and key in the store's URL need TLS; write {scheme}s:// instead of {scheme}://")
    return ServerTarget(
        address=address,
        shown=_shown(scheme, host, port, database, prefix=prefix, durability=durability),
        base=f"{{{prefix}}}:",
        durability=cast("Durability", durability),
        readers=_number("readers", options.get("readers", str(READERS)), 1, 64),
    )


def _check_options(names: Sequence[str]) -> None:
    for name in names:
        if name not in _OPTIONS:
            raise ConfigError(
                f"the URL of the Redis store has the unknown option {name[:40]!r}; its options are "
                f"{', '.join(_OPTIONS)}"
            )
        if names.count(name) > 1:
            raise ConfigError(f"the URL of the Redis store has the option {name} more than once; leave one of them")


def _shown(scheme: str, host: str, port: int, database: int, *, prefix: str, durability: str) -> str:
    said = [f"prefix={prefix}"] if prefix != DEFAULT_PREFIX else []
    said += [f"durability={durability}"] if durability != "always" else []
    where = f"[{host}]" if ":" in host else host
    return f"{scheme}://{where}:{port}/{database}{'?' if said else ''}{'&'.join(said)}"


def _prefix(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.:-]{1,64}", name):
        raise ConfigError(
            f"prefix = {name[:80]!r} in the store's URL must have 1 to 64 letters, digits and characters of _ . : -"
        )
    return name


def _number(what: str, text: str, least: int, most: int) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or not least <= int(text) <= most:
        raise ConfigError(f"{what} = {text[:20]!r} in the store's URL must be a number from {least} to {most}")
    return int(text)
