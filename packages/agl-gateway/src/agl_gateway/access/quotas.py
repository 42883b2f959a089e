"""Limits how much one attempt may record: its model calls, and the spans that it appends with its own token.

The limits hold for all processes of one gateway together, counted from the gateway's start. A process that has used up
its share of a limit asks the other processes for their counts. The first refusal is recorded as a span of the attempt,
so the rollout shows why calls or spans are missing.
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
"""A process may use 1/32 of its part of the remainder before it asks again; limits are exceeded by 3 % at most."""


Kind = Literal["calls", "spans"]


@dataclass(kw_only=True)
class _Attempt:
    """The number of an attempt's calls and spans that this process may count before it has to ask the others."""

    allowed: dict[str, int] = field(default_factory=dict[str, int])
    is_recorded: bool = False


class Quotas:
    """Limits the calls and spans of attempts. Used in one event loop only.

    Args:
        facts: Counts the calls and spans of each attempt.
        max_calls: The most model calls of one attempt.
        max_spans: The most spans that one attempt may append.
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
        """Count ``count`` spans that an attempt's own token appends.

        The admin token has no limit. Workers' tokens do not reach this method.

        Raises:
            Problem: 403 if the spans would exceed the limit; then no span is counted.
        """
        if claim.scope == "admin":
            return
        own = self._facts.usage(claim.attempt_id)
        over = await self._over(claim, "spans", own["spans"] + count)
        if over is not None:
            await self._refuse(claim, f"has appended {over - count} spans and sends {count} more", "spans")
        own["spans"] += count

    async def _over(self, claim: AttemptToken, kind: Kind, wanted: int) -> int | None:
        """Check whether ``wanted`` calls or spans in this process would exceed the attempt's limit.

        Returns the total over all processes if it exceeds the limit, else ``None``.
        """
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
