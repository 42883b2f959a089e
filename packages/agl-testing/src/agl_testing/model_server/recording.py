"""Records the bytes that the server got and sent, call by call, for assertions in the test's own thread."""

import threading
from dataclasses import dataclass, field
from typing import Any

from agl_testing.model_server.script import Dialect


@dataclass(kw_only=True)
class RecordedCall:
    """One HTTP exchange; the server fills it in while it goes on.

    Attributes:
        path: Path with its query string, as the client sent it.
        headers: The request's headers by name in lower case.
        body: The request's bytes; ``json`` is their parsed value, ``None`` if they are no JSON.
        status: Status of the response, 0 before it began.
        chunks: The bytes of the response's body, without transfer framing, one entry per write or streamed event.
        is_complete: Whether the whole response was written; false after a cut or when the client went away.
        is_abandoned: Whether the client closed the connection before the response was complete.
    """

    path: str
    method: str
    headers: dict[str, str]
    body: bytes
    json: Any
    dialect: Dialect
    status: int = 0
    chunks: list[bytes] = field(default_factory=list[bytes])
    is_complete: bool = False
    is_abandoned: bool = False

    @property
    def sent(self) -> bytes:
        """Every byte of the response's body."""
        return b"".join(self.chunks)


class Recording:
    """The calls of one server in order of arrival; safe to read while the server runs."""

    def __init__(self) -> None:
        self._calls: list[RecordedCall] = []
        self._changed = threading.Condition()

    def add(self, call: RecordedCall) -> None:
        """Record a call that has arrived."""
        with self._changed:
            self._calls.append(call)
            self._changed.notify_all()

    def clear(self) -> None:
        """Forget all calls."""
        with self._changed:
            self._calls.clear()

    def snapshot(self) -> list[RecordedCall]:
        """Return the calls so far, in order of arrival."""
        with self._changed:
            return list(self._calls)

    def wait_for(self, count: int, *, timeout: float) -> list[RecordedCall]:
        """Block until ``count`` calls have arrived; raises :class:`TimeoutError` saying how many did."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._calls) >= count, timeout):
                raise TimeoutError(f"{len(self._calls)} of {count} calls reached the server within {timeout} s")
            return list(self._calls)
