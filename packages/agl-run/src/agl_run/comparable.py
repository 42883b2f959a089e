"""Messages in a form that compares equal, whichever client sent them."""

from collections.abc import Mapping, Sequence
from typing import Any

from agl.schemas import Json


def comparable(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Json]]:
    """Return messages without their empty parts: clients differ in whether one is absent, null or empty."""
    return [{key: value for key, value in message.items() if value not in (None, "", [])} for message in messages]
