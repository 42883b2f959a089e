"""Messages in a form that compares equal, whichever client sent them."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import msgspec

from agl.schemas import Json


def comparable(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Json]]:
    """Return messages without their empty parts: clients differ in whether one is absent, null or empty."""
    return [{key: value for key, value in message.items() if value not in (None, "", [])} for message in messages]


class ShownMessages:
    """Remembers the conversations of a rollout, so that each message is shown once."""

    def __init__(self) -> None:
        self._shown: set[bytes] = set()

    def add(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Add a conversation; returns how many of its messages, from the first, an earlier one began with too."""
        digests = list(_digests(comparable(messages)))
        common = sum(1 for _ in takewhile(self._shown.__contains__, digests))
        self._shown.update(digests)
        return common


def _digests(messages: Sequence[Any]) -> Iterator[bytes]:
    """Return a digest of each beginning of a conversation, the shortest first."""
    digest = b""
    for message in messages:
        text = msgspec.json.encode(message, order="sorted")
        digest = hashlib.blake2b(digest + text, digest_size=16).digest()
        yield digest
