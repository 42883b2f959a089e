"""Whether a block of code made any model call that the wire hook saw.

For tracers of frameworks that have no event before a model is called: what such a block did not send through the
hook went past it.
"""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class Departures:
    """How many requests left; shared with the tasks and threads that the block starts."""

    count: int = 0


_DEPARTURES: ContextVar[Departures | None] = ContextVar("agl_departures", default=None)


@contextmanager
def departures() -> Generator[Departures]:
    """Count what leaves within the block; blocks nest, and what an inner one counts counts outside, too.

    Do not yield to a caller inside of it: a generator shares its caller's context.
    """
    outer, mine = _DEPARTURES.get(), Departures()
    token = _DEPARTURES.set(mine)
    try:
        yield mine
    finally:
        _DEPARTURES.reset(token)
        if outer is not None:
            outer.count += mine.count


def note_departure() -> None:
    """A model call leaves here, or is accounted for in another way."""
    found = _DEPARTURES.get()
    if found is not None:
        found.count += 1
