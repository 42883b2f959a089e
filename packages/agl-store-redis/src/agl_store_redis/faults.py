"""Explains errors of the server and of redis-py to the user, and distinguishes temporary from permanent errors."""

import re

from redis import exceptions

from agl.errors import StoreError

_LOST = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)
_ELSEWHERE = (
    *(exceptions.MovedError, exceptions.AskError, exceptions.TryAgainError),
    *(exceptions.ClusterDownError, exceptions.MasterDownError),
)
"""Answers of a node that is not, or not yet, in charge of the store's slot."""

_REPLICA = "read only replica"

_LASTING = (exceptions.AuthenticationError, exceptions.AuthorizationError)

_HINTS: tuple[tuple[str, str], ...] = (
    (
        "wrongpass|noauth|invalid username-password|auth.* called without|authentication required|client sent auth",
        "correct user and password in the URL, with %40 for an @",
    ),
    (
        "noperm|no permissions",
        "the user needs the commands +@read +@write +@scripting +@pubsub +@connection +info +time +multi +exec "
        "+config|get, the keys ~{PREFIX}* and the channels &{PREFIX}* (ACL SETUSER)",
    ),
    (
        "not allowed when used memory",
        "the server's memory is full (maxmemory): delete old rollouts (agl runs gc), copy the store to SQLite or "
        "PostgreSQL (agl data copy), or raise maxmemory; acknowledged writes are safe",
    ),
    (
        "misconf|no space left",
        "the server cannot write to its disk: free some space and see its log; acknowledged writes are safe",
    ),
    (_REPLICA, "that server is a replica; name the primary"),
    ("wrongtype", "keys of another program begin with this prefix; choose another prefix in the URL"),
    ("select is not allowed|db index is out of range", "the server has no such database; write /0 in the URL"),
    ("name or service not known|nodename nor servname|no address", "correct the host in the URL"),
    ("ssl|certificate", "see ca, cert and key in the URL, and write rediss:// only for a port that speaks TLS"),
    ("crossslot|non local key", "the store's keys must lie in one slot; no proxy may rename them"),
    ("surrogates not allowed", "that text is not valid Unicode: it holds a lone surrogate"),
)


def is_lost(error: BaseException) -> bool:
    """Return true if the connection is gone or its server cannot work now, so that another attempt may succeed."""
    if isinstance(error, _LASTING):
        return False
    is_busy = isinstance(error, exceptions.ResponseError) and str(error).startswith("BUSY ")
    return is_busy or is_elsewhere(error) or isinstance(error, _LOST)


def is_elsewhere(error: BaseException) -> bool:
    """Return true if writes must go to another server now, or soon; a new connection may lead there.

    A primary that became a replica keeps open connections, but its host name leads to the new primary.
    """
    is_of_replica = isinstance(error, exceptions.ResponseError) and _REPLICA in str(error)
    return is_of_replica or isinstance(error, _ELSEWHERE)


def is_passing(error: BaseException) -> bool:
    """Return true if a server that refuses a new connection may take one soon."""
    return is_lost(error) and not re.search("name or service|nodename|no address|certificate", str(error).lower())


def explain(error: Exception, shown: str) -> Exception:
    """Turn an error of redis-py, or of text that it cannot send, into one with a remedy; return others unchanged."""
    if not isinstance(error, exceptions.RedisError | OSError | UnicodeEncodeError):
        return error
    text = " ".join(str(error).split()) or type(error).__name__
    for pattern, hint in _HINTS:
        if re.search(pattern, text.lower()):
            return StoreError(f"the store {shown} failed: {text}; {hint}")
    if is_lost(error):
        return StoreError(
            f"the store {shown} cannot be reached: {text}; start the server, or correct host and port in the URL"
        )
    return StoreError(f"the store {shown} failed: {text}; the server's log may say more")
