"""Tells a store's answer from that of a balancer without a store, and how long to wait before the next try."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from agl_gateway.store_api.contract import Fault

RETRY_DELAYS_S = (0.05, 0.2, 0.5, 1.0, 2.0)
RESTART_DELAYS_S = (4.0, 8.0, 16.0)
"""Further delays for a store that has answered before and may be restarting."""

_NO_STORE = (502, 504)
"""Statuses of balancers that get no answer from the store, which never answers with one itself."""

_AWAY = 503
"""The status of balancers without a store, of a store that is busy, and of one whose database fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReply:
    """An answer of the store, or of a balancer before it.

    Attributes:
        retry_after: The header of that name; ``""`` without.
    """

    status: int
    body: bytes
    retry_after: str

    @property
    def is_passing(self) -> bool:
        """True if no store answered, or one that is busy, so that the same request is worth another try."""
        return self.status in _NO_STORE or (self.status == _AWAY and (bool(self.retry_after) or self.fault() is None))

    @property
    def retry_after_s(self) -> float:
        """The seconds of ``Retry-After``; 0 without it, and where it is a date."""
        return float(self.retry_after) if self.retry_after.isdecimal() else 0.0

    @property
    def start(self) -> str:
        """The beginning of the body as text."""
        return self.body[:120].decode("utf-8", "replace")

    def fault(self) -> Fault | None:
        """Return the error in the body of a store's answer, ``None`` for any other body."""
        try:
            return msgspec.msgpack.decode(self.body, type=Fault)
        except msgspec.DecodeError:
            return None


class Pauses:
    """The pauses between the tries of one request."""

    def __init__(self) -> None:
        self._tries = 0
        self._paused_s = 0.0

    def next_s(self, delays: Sequence[float], *, asked_s: float = 0.0) -> float | None:
        """Return the next of ``delays``, or ``asked_s`` where that is longer, but no longer than the longest of them.

        ``None`` once there were as many pauses as ``delays``, or pauses as long as all of them together.
        """
        left_s = sum(delays) - self._paused_s
        if self._tries >= len(delays) or left_s < delays[0]:
            return None
        pause_s = min(max(delays[self._tries], min(asked_s, max(delays))), left_s)
        self._tries += 1
        self._paused_s += pause_s
        return pause_s
