"""Brings a store of layout 1, which kept no statistics and no tallies of attempts, to layout 2.

Processes of older releases must be stopped first: they would finish rollouts that nobody counts.
"""

import logging
from functools import partial
from uuid import uuid4

from agl.contracts import RolloutQuery
from agl.schemas import Span, encode
from agl.stores import MAX_SEQUENCE
from agl_store_redis._reads import RedisReads
from agl_store_redis.connections import Server
from agl_store_redis.layout import CURRENT
from agl_store_redis.scripts import call
from agl_store_redis.urls import ServerTarget
from agl_store_redis.writing import COUNT_PARTS, Part, counts_of
from agl_store_sqlite.sql import recount

_LOG = logging.getLogger("agl_store_redis")

_PAGE = 100


def count_all(server: Server, target: ServerTarget) -> None:
    """Count what the attempts of all rollouts recorded; begins anew after an interruption."""
    _LOG.warning("converting %s to layout %d; a large store takes minutes", target.shown, CURRENT)
    for name in server.run("SMEMBERS", f"{target.base}stn"):
        server.run("UNLINK", f"{target.base}st/{name.decode()}")
    reads, query = RedisReads(server, target.base), RolloutQuery(limit=_PAGE)
    while page := reads.rollouts(query):
        attempts, shares = recount(page, reads.attempts, partial(_all_spans, reads))
        commands: list[Part] = []
        for each in attempts:
            commands += (4, "HSET", f"r/{each.rollout_id}", each.number, encode(each))
        for share in shares:
            commands += (1 + COUNT_PARTS, "COUNT", *counts_of([share]))
        call(server, "commit", target.base, uuid4().hex, 1, 0, *commands, "")
        query = query.next(page[-1])
    server.run("HSET", f"{target.base}meta", "version", CURRENT)


def _all_spans(reads: RedisReads, rollout_id: str, attempt_id: str) -> list[Span]:
    return reads.spans(rollout_id, attempt_id=attempt_id, limit=MAX_SEQUENCE)
