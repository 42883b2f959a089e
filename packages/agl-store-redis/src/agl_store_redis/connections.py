"""Opens connections; in a Cluster, to the node that has the store's slot."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, cast

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import MovedError, RedisError
from redis.retry import Retry

from agl_store_redis.faults import explain, is_lost, is_passing
from agl_store_redis.urls import ServerTarget
from agl_store_sqlite.sql.servers import ServerAccess

ANSWER_S = 60.0
"""Seconds after which a silent server counts as gone."""

_CONNECT_S = 10.0
_HOPS = 5


class _Client(Protocol):
    """The parts of redis-py's client that the store uses, with types."""

    response_callbacks: dict[str, Any]

    def execute_command(self, *command: Any) -> Any: ...

    def pipeline(self, transaction: bool) -> Any: ...

    def pubsub(self) -> Any: ...

    def close(self) -> None: ...


class Server:
    """One connection to a server. Redis-py's errors pass through all methods."""

    def __init__(self, address: dict[str, Any]) -> None:
        client = Redis(
            **address,
            single_connection_client=True,
            protocol=2,
            retry=Retry(NoBackoff(), 0),  # the store repeats by itself what is safe to repeat
            socket_timeout=ANSWER_S,
            socket_connect_timeout=_CONNECT_S,
            socket_keepalive=True,
            client_name="agl",
        )
        self._client = cast("_Client", client)
        self._client.response_callbacks.clear()  # answers as the server sends them, like those of scripts

    def run(self, *command: bytes | str | int | float) -> Any:
        """Run a command and return its answer."""
        return self._client.execute_command(*command)

    def run_all(self, commands: Sequence[tuple[bytes | str | int | float, ...]]) -> list[Any]:
        """Run commands atomically and return their answers."""
        if len(commands) == 1:
            return [self.run(*commands[0])]
        with self._client.pipeline(transaction=True) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            return pipeline.execute()

    def listen(self) -> Any:
        """Return redis-py's reader of messages, which has a separate connection."""
        return self._client.pubsub()

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def connect(target: ServerTarget) -> Server:
    """Open one connection to the server that has the store's keys; redis-py's errors pass through."""
    server = Server(dict(target.address))
    try:
        for _ in range(_HOPS):
            try:
                server.run("EXISTS", f"{target.base}meta")
                break
            except MovedError as moved:
                server.close()
                server = Server({**target.address, **_place(moved, target)})
    except BaseException:
        server.close()
        raise
    return server


def _place(moved: MovedError, target: ServerTarget) -> dict[str, Any]:
    """Return host and port of the node that the error names; without a host in it, the host stays the same."""
    host, port = str(moved).rpartition(" ")[2].rsplit(":", 1)
    return {"host": host or target.address["host"], "port": int(port)}


class Moves:
    """Counts how often the writer had to move to another server; the store's other connections then move too."""

    def __init__(self) -> None:
        self.count = 0


def access_of(target: ServerTarget) -> ServerAccess[Server]:
    """Return the access to a server: how to connect to it, and how to interpret redis-py's errors."""
    return ServerAccess(
        shown=target.shown,
        connect=partial(connect, target),
        errors=(RedisError, OSError),
        is_passing=is_passing,
        is_lost=lambda error, _: is_lost(error),
        is_usable=lambda error, _: isinstance(error, RedisError),  # after others, an answer may still be under way
        explain=explain,
    )
