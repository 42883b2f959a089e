"""Limits what one attempt may record: its model calls, and the spans that it appends with its own token.

Each gateway counts for itself, from its start. The first refusal is recorded as a span of the attempt, so that the
rollout says why calls or spans are missing.
"""

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass

from agl.contracts import Store
from agl.errors import AglError
from agl.schemas import Span, new_span_id, new_trace_id
from agl_gateway.problems import Problem
from agl_run.tokens import AttemptToken

_log = logging.getLogger(__name__)

_REMEMBERED = 20_000


@dataclass(kw_only=True)
class _Counts:
    calls: int = 0
    spans: int = 0
    is_told: bool = False


class Quotas:
    """Counts the calls and spans of attempts. Used in one event loop only.

    Args:
        max_calls: Model calls of one attempt.
        max_spans: Spans that one attempt may append.
    """

    def __init__(self, store: Store, *, max_calls: int, max_spans: int) -> None:
        self._store = store
        self._max_calls = max_calls
        self._max_spans = max_spans
        self._counts: OrderedDict[str, _Counts] = OrderedDict()

    async def add_call(self, claim: AttemptToken) -> None:
        """Count a model call; raises a 403 :class:`Problem` beyond the limit."""
        counts = self._of(claim)
        if counts.calls >= self._max_calls:
            await self._refuse(claim, counts, f"has made {counts.calls} model calls", "max_calls")
        counts.calls += 1

    async def add_spans(self, claim: AttemptToken, count: int) -> None:
        """Count spans of an attempt's own token, all or none; raises a 403 :class:`Problem` beyond the limit."""
        if claim.scope != "attempt":
            return
        counts = self._of(claim)
        if counts.spans + count > self._max_spans:
            sent = f"has appended {counts.spans} spans and sends {count} more"
            await self._refuse(claim, counts, sent, "max_spans")
        counts.spans += count

    def _of(self, claim: AttemptToken) -> _Counts:
        counts = self._counts.setdefault(claim.attempt_id, _Counts())
        self._counts.move_to_end(claim.attempt_id)
        if len(self._counts) > _REMEMBERED:
            self._counts.popitem(last=False)
        return counts

    async def _refuse(self, claim: AttemptToken, counts: _Counts, done: str, setting: str) -> None:
        limit = self._max_calls if setting == "max_calls" else self._max_spans
        message = (
            f"attempt {claim.attempt_id!r} {done}; the gateway takes {limit} of one attempt. Look for a loop in the "
            f"agent, or raise the gateway's {setting}"
        )
        if not counts.is_told:
            counts.is_told = True
            await self._tell(claim, message)
        raise Problem(403, message, code="quota_exceeded")

    async def _tell(self, claim: AttemptToken, message: str) -> None:
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
