"""Who is about to call a model: the agents, nodes and roles that are open around the running code.

After a run the same question is answered from the recorded spans; while it runs, those that matter are still open.
So every tracer, and :class:`agl.operation`, keeps in :attr:`Capture.opened` how its open spans look now, and the one
rule of :mod:`agl._who` reads them. What has ended before the call leaves is not seen here: work that outlives
the operation that started it belongs to nobody until the spans are read.
"""

import logging

from agl._who import Enclosing, Who
from agl.schemas import Span
from agl.tracing._context import Capture, current, innermost

_log = logging.getLogger(__name__)

_LATE_S = 0.5
"""Seconds that a tracer gets to hand over events that it hears later than they happen, as CrewAI's are."""

_MAX_DEPTH = 10_000


def who(capture: Capture | None = None) -> Who:
    """Who makes a model call that leaves here and now; all names are empty outside a rollout.

    Args:
        capture: The attempt; by default the one that is current.
    """
    found = capture or current()
    if found is None:
        return Who()
    span_id = innermost(found)
    if span_id == found.root_span_id:
        return Who()
    if span_id not in found.opened:
        _wait_for_events(found)
    chain = _chain(found, span_id)
    return Enclosing(chain).who(chain[0]) if chain else Who()


def _chain(capture: Capture, span_id: str) -> list[Span]:
    """The open spans around the running code, innermost first."""
    chain: list[Span] = []
    describe = capture.opened.get(span_id)
    while describe is not None and len(chain) < _MAX_DEPTH:
        try:
            span = describe()
        except Exception:  # noqa: BLE001  # isolation point: runs inside the agent's own call
            _log.exception("An open span could not be described; the names around it are lost to this call.")
            break
        chain.append(span)
        describe = capture.opened.get(span.parent_id or "")
    return chain


def _wait_for_events(capture: Capture) -> None:
    for tracer in capture.tracers:
        try:
            tracer.flush(_LATE_S)
        except Exception:  # noqa: BLE001  # isolation point: runs inside the agent's own call
            _log.exception("A tracer could not hand over its events; the call may be attributed to nobody.")
