"""Tracing: the attempt that the running code belongs to, its actors, and its operations as spans.

This module is for authors of tracers (:func:`open_span`), of gateways (routing, spans of model calls) and of runners
(:func:`activate`). Authors of agents find their functions in :mod:`agl`.
"""

from typing import TYPE_CHECKING

from agl._actors import Who
from agl._lazy import lazy_names
from agl._redact import redact
from agl.tracing._activate import activate
from agl.tracing._caller import who
from agl.tracing._context import ActiveAttempt, SpanRecorder, current, current_span_id
from agl.tracing._import_watch import ImportWatch
from agl.tracing._open_span import OpenSpan, current_span, note_model_call, open_span, stepped
from agl.tracing._patches import SharedTracer, Undo, around, around_async, around_attempts, patch, patch_subclasses
from agl.tracing._routing import WHO_HEADER, decode_names, upstreams_for
from agl.tracing._span_values import plain
from agl.tracing._spans import chat_spans, make_reward_span

if TYPE_CHECKING:
    from agl.tracing._otel import OtelTracer
    from agl.tracing._wire.hook import WireTracer

__all__ = [
    "WHO_HEADER",
    "ActiveAttempt",
    "ImportWatch",
    "OpenSpan",
    "OtelTracer",
    "SharedTracer",
    "SpanRecorder",
    "Undo",
    "Who",
    "WireTracer",
    "activate",
    "around",
    "around_async",
    "around_attempts",
    "chat_spans",
    "current",
    "current_span",
    "current_span_id",
    "decode_names",
    "make_reward_span",
    "note_model_call",
    "open_span",
    "patch",
    "patch_subclasses",
    "plain",
    "redact",
    "stepped",
    "upstreams_for",
    "who",
]

__getattr__ = lazy_names(__name__, {"agl.tracing._otel": ("OtelTracer",), "agl.tracing._wire.hook": ("WireTracer",)})
