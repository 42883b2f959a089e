"""Makes the records of an attempt storable: an unusual value then costs a part of one span, not the run.

Stores hold what msgpack can encode: no integers beyond 64 bits, no lone surrogates in text, no objects. Such values
become text if :func:`agl.tracing.plain` can convert them; others are left out, and the span says so.
"""

from typing import Any, cast

import msgspec

from agl import semconv
from agl.errors import ConflictError
from agl.schemas import ErrorInfo, ModelCall, Outcome, Span, encode, rollout_id_of
from agl.tracing import plain
from agl_run.runners.result import describe_error

UNFIT = (TypeError, ValueError, OverflowError, RecursionError)
"""Errors that encoding a value raises if no store can hold it."""

_ENDED_OTHERWISE = ("failed", "timeout", "lost", "cancelled")


def storable_span(span: Span) -> Span:
    """Return the span if a store can hold it; else a copy that leaves out the unfit parts and names the reason."""
    fault = fault_of(span)
    if not fault:
        return span
    parts: dict[str, Any] = {name: getattr(span, name) for name in span.__struct_fields__}
    # Names may hold halves of characters, as from a file name that is not UTF-8.
    parts |= {name: plain(parts[name]) for name in ("span_id", "name", "status_message")}
    parts["attributes"] = _fitting(span.attributes) | {semconv.NOT_STORED: plain(fault)}
    parts["call"] = None if span.call is None else _fitting_call(span.call)
    # Parts that still do not fit are left out; the attribute above reports this.
    return Span(**{name: value for name, value in parts.items() if not fault_of(value)})


def storable_outcome(outcome: Outcome, refusal: Exception) -> Outcome | None:
    """Return a storable replacement for an outcome that a store refused; ``None`` if the outcome has no fault.

    A success becomes a failure with the refusal as its error. Spans of other attempts are left out, and so are spans
    whose reward is not a finite number.
    """
    # A tracer that mixes up two attempts must not write into the other one.
    own = [span for span in outcome.spans if _is_own(span, outcome.attempt_id)]
    spans = tuple(storable_span(span) for span in own)
    # The store refused something that this function finds no fault with.
    if spans == outcome.spans and not fault_of(outcome.error) and not isinstance(refusal, ConflictError):
        return None
    # A success whose result is lost would train on a reward that is not there.
    if outcome.status not in _ENDED_OTHERWISE:
        error = describe_error(refusal)
        return Outcome(attempt_id=outcome.attempt_id, status="failed", error=error, spans=spans)
    return msgspec.structs.replace(outcome, error=_storable_error(outcome.error), spans=spans)


def fault_of(value: object) -> str:
    """Return the reason why a store cannot hold a value; ``""`` if it can."""
    try:
        encode(value)
    except UNFIT as error:
        return str(error) or type(error).__name__
    return ""


def _fitting(value: Any) -> Any:
    """Return a storable copy of a JSON value; entries that are nested too deeply are left out."""
    try:
        return plain(value)
    except RecursionError:
        entries = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
        return {key: item for key, item in entries.items() if not fault_of((key, item))}


def _fitting_call(call: ModelCall) -> ModelCall:
    """Return a call whose request and response can be stored; its tokens do not change."""
    if not fault_of(call):
        return call
    return msgspec.structs.replace(call, request=_fitting(call.request), response=_fitting(call.response))


def _is_own(span: Span, attempt_id: str) -> bool:
    is_named = span.attempt_id == attempt_id and span.rollout_id == rollout_id_of(attempt_id)
    try:
        return is_named and not (span.reward is not None and span.reward.fault)
    except TypeError:  # a value that is not a number
        return False


def _storable_error(error: ErrorInfo | None) -> ErrorInfo | None:
    if error is None:
        return None
    return ErrorInfo(type=plain(error.type), message=plain(error.message), traceback=plain(error.traceback))
