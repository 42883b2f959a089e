"""Capture: which attempt the running code belongs to, and what it does, as spans.

Emitters are in :mod:`agl.capture.emitters`, attempt tokens in :mod:`agl.capture.token`.
"""

from agl.capture.caller import who
from agl.capture.context import Capture, activate, current, current_span_id
from agl.capture.recorder import SpanRecorder

__all__ = ["Capture", "SpanRecorder", "activate", "current", "current_span_id", "who"]
