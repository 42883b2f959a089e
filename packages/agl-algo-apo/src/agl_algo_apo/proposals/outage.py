"""Waiting out an outage of the optimiser's model: how long, how often, and who is told.

Each question waits on its own, longer from try to try, or as long as the endpoint asks for in ``Retry-After``
(RFC 9110, section 10.2.3: seconds, or a date). The user is told once for all questions that wait at the same time.
"""

import asyncio
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Literal, NamedTuple

LONGEST_PAUSE_S = 30.0
"""Most seconds between two tries where the endpoint asks for no pause of its own."""


class NoAnswer(NamedTuple):
    """A try that brought no answer.

    Attributes:
        why: The reason in words.
        kind: ``passing`` for an outage, ``spoilt`` for an answer that no API gives, ``refused`` where waiting is of no
            use.
        pause_s: Seconds that the endpoint asks to wait, ``None`` if it does not say.
        may_cost: Whether the model may have answered all the same, and that answer may have to be paid for.
    """

    why: str
    kind: Literal["passing", "spoilt", "refused"]
    pause_s: float | None = None
    may_cost: bool = False


class Outages:
    """Tells the user about outages, once for all questions that wait at the same time.

    Args:
        address: The endpoint, for the message.
        wait_s: Most seconds that one question waits.
        retry_s: Seconds before its second try, doubled for each further one.
        say: Shows the user one line.
    """

    def __init__(self, *, address: str, wait_s: float, retry_s: float, say: Callable[[str], None]) -> None:
        self.wait_s = wait_s
        self.retry_s = retry_s
        self._address = address
        self._say = say
        self._waiting: set[Wait] = set()

    @contextmanager
    def waiting(self) -> Generator["Wait"]:
        """Open the waiting of one question."""
        wait = Wait(self)
        try:
            yield wait
        finally:
            self._waiting.discard(wait)

    def tell(self, wait: "Wait", why: str) -> None:
        """Say that a question waits, unless another one does."""
        if not self._waiting:
            self._say(
                f"the optimiser's model at {self._address} does not answer ({why}); the search waits for it, "
                f"for {self.wait_s:g} s at most"
            )
        self._waiting.add(wait)


class Wait:
    """The waiting of one question."""

    def __init__(self, outages: Outages) -> None:
        self._outages = outages
        self._pause = outages.retry_s
        self._ends: float | None = None  # on the event loop's clock, from the first failure on

    async def pause(self, failure: NoAnswer) -> bool:
        """Wait before the next try; returns false, at once, if that would take longer than is allowed."""
        now = asyncio.get_running_loop().time()
        if self._ends is None:
            self._ends = now + self._outages.wait_s
        pause = self._pause if failure.pause_s is None else failure.pause_s
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
        if now + pause > self._ends:
            return False
        self._outages.tell(self, failure.why)
        await asyncio.sleep(pause)
        return True


def requested_pause(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a ``Retry-After`` header asks for, ``None`` without one that can be read."""
    value = headers.get("retry-after", "").strip()
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    if date.tzinfo is None:  # "-0000": a date in UTC that names no zone
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())
