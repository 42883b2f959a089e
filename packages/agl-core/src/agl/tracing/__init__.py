"""Tracing: which attempt the running code belongs to, who acts in it, and what it does, as spans."""

from typing import TYPE_CHECKING

from agl._lazy import lazy_names
from agl._redact import redact
from agl.tracing._caller import who
from agl.tracing._context import Capture, activate, current, current_scope, current_span_id, innermost
from agl.tracing._departures import departures, note_departure
from agl.tracing._emitters import (
    emit_exception,
    emit_message,
    emit_object,
    emit_observation,
    emit_reward,
    failure,
    plain,
)
from agl.tracing._operation import operation
from agl.tracing._process import Undo, add_scope, remove_scope, replace
from agl.tracing._recorder import SpanRecorder

if TYPE_CHECKING:
    from agl.tracing._otel import OtelTracer
    from agl.tracing._roles import WHO_HEADER, check_patterns, claimants, decode_names, names_of
    from agl.tracing._secret import SECRET_ENV, load_secret, state_dir
    from agl.tracing._spans import chat_spans, make_reward_span
    from agl.tracing._token import AdminKey, AttemptToken, AttemptTokens
    from agl.tracing._wire.hook import WireTracer
    from agl.tracing._wire.routing import host_of

__all__ = [
    "SECRET_ENV",
    "WHO_HEADER",
    "AdminKey",
    "AttemptToken",
    "AttemptTokens",
    "Capture",
    "OtelTracer",
    "SpanRecorder",
    "Undo",
    "WireTracer",
    "activate",
    "add_scope",
    "chat_spans",
    "check_patterns",
    "claimants",
    "current",
    "current_scope",
    "current_span_id",
    "decode_names",
    "departures",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_observation",
    "emit_reward",
    "failure",
    "host_of",
    "innermost",
    "load_secret",
    "make_reward_span",
    "names_of",
    "note_departure",
    "operation",
    "plain",
    "redact",
    "remove_scope",
    "replace",
    "state_dir",
    "who",
]

__getattr__ = lazy_names(
    __name__,
    {
        "agl.tracing._spans": ("chat_spans", "make_reward_span"),
        "agl.tracing._otel": ("OtelTracer",),
        "agl.tracing._roles": ("WHO_HEADER", "check_patterns", "claimants", "decode_names", "names_of"),
        "agl.tracing._secret": ("SECRET_ENV", "load_secret", "state_dir"),
        "agl.tracing._token": ("AdminKey", "AttemptToken", "AttemptTokens"),
        "agl.tracing._wire.hook": ("WireTracer",),
        "agl.tracing._wire.routing": ("host_of",),
    },
)
