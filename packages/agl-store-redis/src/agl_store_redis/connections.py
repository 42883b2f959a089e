"""Opens connections, follows a Cluster to the node that has the store's slot, and waits for a server that restarts."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import MovedError, RedisError
from redis.retry import Retry

from agl.errors import StoreError
from agl_store_redis.faults import explain, is_passing
from agl_store_redis.urls import ServerTarget

START_WAIT_S = 4.0
"""Seconds to wait for a server that never answered."""

RESTART_WAIT_S = 30.0
"""Seconds to wait for a server that has answered before and may be restarting."""

ANSWER_S = 60.0
"""Seconds after which a silent server counts as gone."""

_CONNECT_S = 10.0
_HOPS = 5
_DELAYS_S = (0.05, 0.2, 0.5, 1.0)


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
        """Run commands at one moment and return their answers."""
        if len(commands) == 1:
            return [self.run(*commands[0])]
        with self._client.pipeline(transaction=True) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            return pipeline.execute()

    def listen(self) -> Any:
        """Return redis-py's reader of messages, which has a connection of its own."""
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
    """Return host and port of the node that the error names; a node that does not know its name has the same host."""
    host, port = str(moved).rpartition(" ")[2].rsplit(":", 1)
    return {"host": host or target.address["host"], "port": int(port)}


class Moves:
    """Counts how often the writer found another server in charge; the store's other connections follow it."""

    count = 0


class ThreadConnection:
    """The connection of one thread of an open store, opened on demand.

    Args:
        stopping: Set when the store is closed; ends every wait for the server.
        moves: Those of the store; a connection from before the last one is made anew.
    """

    def __init__(
        self, target: ServerTarget, *, stopping: threading.Event, moves: Moves, server: Server | None = None
    ) -> None:
        self._target = target
        self._stopping = stopping
        self._moves = moves
        self._made_after = moves.count
        self._server = server

    @property
    def current(self) -> Server | None:
        """The connection in its current state; ``None`` if there is none."""
        return self._server

    @property
    def is_outdated(self) -> bool:
        """True if another server may be in charge since the connection was made."""
        return self._made_after != self._moves.count

    def open(self) -> Server:
        """Return the connection, opened on demand; raises :class:`StoreError` if the server stays unreachable."""
        if self.is_outdated:
            self.drop()
        if self._server is None:
            self._made_after = self._moves.count
            self._server = connect_in_time(
                lambda: connect(self._target), self._target, self._stopping, limit_s=RESTART_WAIT_S
            )
        return self._server

    def drop(self) -> None:
        """Close the connection; the next :meth:`open` opens another one."""
        if self._server is not None:
            self._server.close()
            self._server = None


def connect_in_time(
    make: Callable[[], Server], target: ServerTarget, stopping: threading.Event, *, limit_s: float
) -> Server:
    """Call ``make`` until the server can be reached, and return its result; other errors are raised at once."""
    end = time.monotonic() + limit_s
    delays = iter(_DELAYS_S)
    while True:
        try:
            return make()
        except (RedisError, OSError) as error:
            if not is_passing(error) or time.monotonic() > end or stopping.wait(next(delays, _DELAYS_S[-1])):
                raise explain(error, target.shown) from error


def forked_error(target: ServerTarget) -> StoreError:
    """Return the error for a process that inherited the store by a fork."""
    return StoreError(
        f"the store {target.shown} was opened in another process; open it again in this one: its connections and "
        "threads do not survive a fork"
    )
