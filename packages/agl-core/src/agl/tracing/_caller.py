"""Who is about to call a model: the agents, nodes and roles that are open around the running code.

After a run the same question is answered from the recorded spans; while it runs, those that matter are still open.
"""

import logging

from agl._actors import Who, step_into
from agl.tracing._context import ActiveAttempt, current, innermost
from agl.tracing._open_span import OpenSpan

_log = logging.getLogger(__name__)

_LATE_S = 0.5
"""Seconds that a tracer gets to hand over events that it hears later than they happen, as CrewAI's are."""

_MAX_DEPTH = 10_000


def who(attempt: ActiveAttempt | None = None) -> Who:
    """Who makes a model call that leaves here and now; all names are empty outside a rollout.

    What has ended before the call leaves is not seen here: work that outlives the operation that started it belongs
    to nobody until the spans are read.

    Args:
        attempt: By default the one that is current.
    """
    attempt = attempt or current()
    return Who() if attempt is None else who_within(attempt, innermost(attempt))


def who_within(attempt: ActiveAttempt, span_id: str) -> Who:
    """Who makes a model call within that open span."""
    if span_id == attempt.root_span_id:
        return Who()
    if attempt.spans.get(span_id) is None:
        _wait_for_events(attempt)
    chain: list[OpenSpan] = []
    span = attempt.spans.get(span_id)
    while isinstance(span, OpenSpan) and len(chain) < _MAX_DEPTH:
        chain.append(span)
        span = attempt.spans.get(span.parent_id)
    found = Who()
    for enclosing in reversed(chain):
        found = step_into(found, *enclosing.actor_attributes())
    return found


def _wait_for_events(attempt: ActiveAttempt) -> None:
    for tracer in attempt.tracers:
        try:
            tracer.flush(_LATE_S)
        except Exception:  # noqa: BLE001  # isolation point: runs inside the agent's own call
            _log.exception("A tracer could not hand over its events; the call may be attributed to nobody.")
