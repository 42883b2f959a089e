"""Refuses a server that is too old, or that would lose or evict what the store acknowledges."""

import re
from collections.abc import Mapping

from redis.exceptions import RedisError

from agl.errors import StoreError
from agl_store_redis.connections import Server
from agl_store_redis.faults import is_lost
from agl_store_redis.urls import ServerTarget

LEAST = {"Redis": (6, 2), "Valkey": (7, 2)}

_FSYNC = {"always": ("always",), "second": ("always", "everysec")}
_HIDDEN = re.compile("unknown|not allowed|noperm|no permissions|disabled|denied", re.IGNORECASE)


def check_server(server: Server, target: ServerTarget) -> None:
    """Check the server's version, and its configuration against the durability in the URL.

    Raises:
        StoreError: The server is too old, or less durable than the URL requires; names the setting to change.
    """
    lines = server.run("INFO").decode().splitlines()
    info = {name: value for name, separator, value in (line.partition(":") for line in lines) if separator}
    _check_version(info, target)
    if target.durability != "none":
        _check_memory(info, target)
        _check_log(server, info, target)


def _check_version(info: Mapping[str, str], target: ServerTarget) -> None:
    name = "Valkey" if "valkey_version" in info else "Redis"
    version = info[f"{name.lower()}_version"]
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found < LEAST[name]:
        least = " or ".join(f"{each} {'.'.join(map(str, numbers))}" for each, numbers in LEAST.items())
        raise StoreError(f"the server of {target.shown} is {name} {version}; the store needs {least}, or a newer one")


def _check_memory(info: Mapping[str, str], target: ServerTarget) -> None:
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise StoreError(
            f"the server of {target.shown} has maxmemory-policy {policy} and would evict records when its memory is "
            "full; run CONFIG SET maxmemory-policy noeviction and write it into its configuration, or accept the loss "
            "with durability=none in the URL"
        )


def _check_log(server: Server, info: Mapping[str, str], target: ServerTarget) -> None:
    if not int(info.get("aof_enabled", "0")):
        raise StoreError(
            f"the server of {target.shown} has appendonly no and would lose acknowledged writes in a crash; run CONFIG "
            "SET appendonly yes and CONFIG SET appendfsync always and write both into its configuration, or accept the "
            "loss with durability=none in the URL"
        )
    allowed = _FSYNC[target.durability]
    settings = _settings(server, target)
    if settings is None:
        return
    fsync, during = settings["appendfsync"], settings["no-appendfsync-on-rewrite"]
    if fsync not in allowed:
        advice = "second in the URL" if fsync == "everysec" else "none in the URL"
        raise StoreError(
            f"the server of {target.shown} has appendfsync {fsync} and would lose acknowledged writes in a crash; run "
            f"CONFIG SET appendfsync {allowed[-1]} and write it into its configuration, or accept the loss with "
            f"durability={advice}"
        )
    if during != "no":
        raise StoreError(
            f"the server of {target.shown} has no-appendfsync-on-rewrite {during} and would lose acknowledged writes "
            "in a crash while it rewrites its log; run CONFIG SET no-appendfsync-on-rewrite no and write it into its "
            "configuration, or accept the loss with durability=none in the URL"
        )


def _settings(server: Server, target: ServerTarget) -> Mapping[str, str] | None:
    """Return the settings of the server's log; ``None`` if they are hidden and the URL accepts a loss of seconds."""
    names = ("appendfsync", "no-appendfsync-on-rewrite")
    try:
        answers = {name: server.run("CONFIG", "GET", name) for name in names}
    except RedisError as error:
        if is_lost(error) or not _HIDDEN.search(str(error)):
            raise
        answers = {}
    found = {name: answer[1].decode() for name, answer in answers.items() if answer}
    if len(found) == len(names):
        return found
    if target.durability == "always":
        raise StoreError(
            f"the server of {target.shown} hides its configuration (CONFIG GET appendfsync), as managed servers do, so "
            "the store cannot tell what a crash would lose; let the user run CONFIG GET, or say in the URL what may be "
            "lost: durability=second for the last second, durability=none for anything"
        )
    return None
