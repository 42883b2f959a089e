"""Finds the caller of a model: the agents, nodes and roles whose spans are open around the running code.

After a run, :class:`agl.episodes.Enclosing` finds callers in recorded spans.
"""

import logging

from agl._actors import Who, step_into
from agl.tracing._context import ActiveAttempt, current, innermost
from agl.tracing._open_span import OpenSpan

_log = logging.getLogger(__name__)

_LATE_S = 2.0
"""Seconds to wait for tracers whose framework delivers events late, as CrewAI does."""

# A limit for spans whose parents form a cycle, which foreign ids can make.
_MAX_DEPTH = 10_000


def who(attempt: ActiveAttempt | None = None) -> Who:
    """The actors of a model call that the running code would make now; all names are empty outside a rollout.

    Only open spans are considered. If an operation ends before the work that it started, the actor of that work is
    found only later, in the recorded spans.

    Args:
        attempt: The attempt; by default the current one.
    """
    attempt = attempt or current()
    return Who() if attempt is None else who_within(attempt, innermost(attempt))


def who_within(attempt: ActiveAttempt, span_id: str) -> Who:
    """The actors of a model call inside the open span with the id ``span_id``."""
    # Nobody is named at the root, so there is nothing to wait for.
    if span_id == attempt.root_span_id:
        return Who()
    chain, is_whole = _enclosing(attempt, span_id)
    # If a framework delivers its events late, its tracer may have named a span that is not open
    # yet. Waiting a little is better than losing the agent's name.
    if not is_whole:
        _wait_for_events(attempt)
        chain, _ = _enclosing(attempt, span_id)
    found = Who()
    # From the outermost inwards, as step_into expects it.
    for enclosing in reversed(chain):
        found = step_into(found, *enclosing.actor_attributes())
    return found


def _enclosing(attempt: ActiveAttempt, span_id: str) -> tuple[list[OpenSpan], bool]:
    """Return the open spans from ``span_id`` outwards, and whether they reach the attempt's root without a gap."""
    chain: list[OpenSpan] = []
    span = attempt.spans.get(span_id)
    while isinstance(span, OpenSpan) and len(chain) < _MAX_DEPTH:
        chain.append(span)
        span = attempt.spans.get(span.parent_id)
    outermost = chain[-1].parent_id if chain else span_id
    return chain, span is not None or outermost == attempt.root_span_id


def _wait_for_events(attempt: ActiveAttempt) -> None:
    for tracer in attempt.tracers:
        try:
            tracer.flush(_LATE_S)
        except Exception:  # noqa: BLE001  # isolation point: runs inside the agent's own call
            _log.exception("A tracer could not record its pending events; the call may have no agent.")
