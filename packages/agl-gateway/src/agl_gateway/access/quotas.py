"""Limits what one attempt may record: its model calls, and the spans that it appends with its own token.

Each gateway counts for itself, from its start, and for all of its processes: one that has used its part of a limit asks
the others for theirs. The first refusal is recorded as a span of the attempt, so that the rollout says why calls or
spans are missing.
"""

import logging
import time
from dataclasses import dataclass, field
from typing import Literal

from agl.contracts import Store
from agl.errors import AglError
from agl.schemas import Span, new_span_id, new_trace_id
from agl_gateway.processes.attempt_facts import AttemptFacts
from agl_gateway.recent import Recent
from agl_gateway.wire.problems import Problem
from agl_run.access import AttemptToken

_log = logging.getLogger(__name__)

_REMEMBERED = 20_000
_SHARES = 32
"""Parts of what is left that a process may use before it asks the others again; so they exceed a limit by 3 % at most.
"""


Kind = Literal["calls", "spans"]


@dataclass(kw_only=True)
class _Attempt:
    """What is known of one attempt's limits: the counts up to which this process need not ask the others."""

    allowed: dict[str, int] = field(default_factory=dict[str, int])
    is_recorded: bool = False


class Quotas:
    """Limits the calls and spans of attempts. Used in one event loop only.

    Args:
        facts: Counts them.
        max_calls: Model calls of one attempt.
        max_spans: Spans that one attempt may append.
    """

    def __init__(self, store: Store, facts: AttemptFacts, *, max_calls: int, max_spans: int) -> None:
        self._store = store
        self._facts = facts
        self._limits: dict[Kind, int] = {"calls": max_calls, "spans": max_spans}
        self._attempts: Recent[str, _Attempt] = Recent(_REMEMBERED)

    async def add_call(self, claim: AttemptToken) -> None:
        """Count a model call; raises a 403 :class:`Problem` beyond the limit."""
        own = self._facts.usage(claim.attempt_id)
        over = await self._over(claim, "calls", own["calls"] + 1)
        if over is not None:
            await self._refuse(claim, f"has made {over - 1} model calls", "calls")
        own["calls"] += 1

    async def add_spans(self, claim: AttemptToken, count: int) -> None:
        """Count spans of an attempt's own token, all or none; raises a 403 :class:`Problem` beyond the limit.

        Only the admin's token appends without a limit; those of workers do not come here.
        """
        if claim.scope == "admin":
            return
        own = self._facts.usage(claim.attempt_id)
        over = await self._over(claim, "spans", own["spans"] + count)
        if over is not None:
            await self._refuse(claim, f"has appended {over - count} spans and sends {count} more", "spans")
        own["spans"] += count

    async def _over(self, claim: AttemptToken, kind: Kind, wanted: int) -> int | None:
        """Return the count of all processes if ``wanted`` by this one takes it beyond the limit; else ``None``."""
        attempt, limit, processes = (
            self._attempts.touched(claim.attempt_id, _Attempt),
            self._limits[kind],
            self._facts.processes,
        )
        share = 1 if processes == 1 else _SHARES * processes
        if wanted <= attempt.allowed.get(kind, limit // share):
            return None
        others = await self._facts.others(claim.attempt_id)
        total = wanted + (others.calls if kind == "calls" else others.spans)
        if total > limit:
            return total
        attempt.allowed[kind] = wanted + (limit - total) // share
        return None

    async def _refuse(self, claim: AttemptToken, done: str, kind: Kind) -> None:
        message = (
            f"attempt {claim.attempt_id!r} {done}; the gateway takes {self._limits[kind]} of one attempt. Look for a "
            f"loop in the agent, or raise the gateway's max_{kind}"
        )
        attempt = self._attempts.touched(claim.attempt_id, _Attempt)
        if not attempt.is_recorded:
            attempt.is_recorded = True
            await self._append_refusal(claim, message)
        raise Problem(403, message, code="quota_exceeded")

    async def _append_refusal(self, claim: AttemptToken, message: str) -> None:
        now = time.time_ns()
        span = Span(
            rollout_id=claim.rollout_id,
            attempt_id=claim.attempt_id,
            span_id=new_span_id(),
            trace_id=new_trace_id(),
            name="agl.gateway.quota",
            start_ns=now,
            end_ns=now,
            status="error",
            status_message=message,
        )
        try:
            await self._store.append_spans([span])
        except AglError as error:
            _log.warning("the store could not record that %s: %s", message, error)
