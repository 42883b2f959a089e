"""Encodes server-sent events, in the two styles of model APIs."""

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"


def data_event(value: dict[str, Any]) -> bytes:
    """Return an event without a name, as in chat and text completions."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """Return an event named by its ``type``, as in responses and messages."""
    return b"event: " + str(value["type"]).encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"
