"""Tells attributes that describe a run from those that hold its contents.

Without contents only attributes on these lists pass: what tracers and agents add under other names may be anything.
"""

import re
from collections.abc import Mapping
from typing import Any

from agl.schemas import Json, SpanEvent

_DESCRIPTIVE = re.compile(
    r"gen_ai\.(operation\.name|provider\.name|system|workflow\.name|conversation\.id|output\.type|data_source\.id"
    r"|agent\.(name|id|version)|tool\.(name|type|call\.id)|request\..+|response\..+|usage\..+"
    r"|embeddings\..+|evaluation\.(name|score\..+))"
    r"|agl\.(?!observation\.content$|message$|object$|output$).+"
    r"|error\.type|exception\.(type|escaped)|server\.(address|port)|user_agent\.original|otel\.scope\..+"
)


def allowed(attributes: Mapping[str, Any], *, has_contents: bool) -> dict[str, Json]:
    """Return the attributes that may be sent."""
    if has_contents:
        return dict(attributes)
    return {key: value for key, value in attributes.items() if _DESCRIPTIVE.fullmatch(key)}


def allowed_events(events: tuple[SpanEvent, ...], *, has_contents: bool) -> list[SpanEvent]:
    """Return the events with the attributes that may be sent."""
    return [
        SpanEvent(
            name=event.name, time_ns=event.time_ns, attributes=allowed(event.attributes, has_contents=has_contents)
        )
        for event in events
    ]
