"""Answers reads by scripts, after the server's clock has said that no attempt is overdue."""

import threading
from collections.abc import Sequence
from typing import Any

from agl_store_redis._reads import RedisReads, VanishedError
from agl_store_redis.connections import Moves, Server, access_of
from agl_store_redis.scripts import call
from agl_store_redis.urls import ServerTarget
from agl_store_sqlite.sql.batches import Look, OverdueError, answer_to
from agl_store_sqlite.sql.servers import BatchReader, ThreadConnection, UncheckedRead


def reader_of(target: ServerTarget, *, stopping: threading.Event, moves: Moves) -> BatchReader[Server]:
    """Make a reader whose connections move to another server when the writer's connection does."""

    def read_all(server: Server, looks: Sequence[Look]) -> list[Any]:
        now, deadline = read_clock(server, target.base)
        is_overdue = deadline is not None and deadline <= now
        return [
            OverdueError() if is_overdue and not isinstance(look, UncheckedRead) else _answer(server, target.base, look)
            for look in looks
        ]

    access = access_of(target)
    return BatchReader(
        access,
        connection=lambda: ThreadConnection(access, stopping=stopping, epoch=lambda: moves.count),
        read_all=read_all,
    )


def _answer(server: Server, base: str, look: Look) -> Any:
    while True:
        try:
            return answer_to(look, RedisReads(server, base))
        except VanishedError:
            continue  # each time, somebody removed another rollout of the page


def read_clock(server: Server, base: str) -> tuple[float, float | None]:
    """Return the server's time and the next deadline, in Unix seconds."""
    seconds, micros, due = call(server, "clock", base)
    return int(seconds) + int(micros) / 1e6, float(due) if due else None
