"""Logs attempts that fail outside of their agent: the first error of a kind in full, later ones as a count.

A reward that always raises would otherwise fill the terminal. The store holds each error with its traceback.
"""

import logging
import re
from collections import Counter

_LOG = logging.getLogger("agl_run.runners")


def kind_of(error: str) -> str:
    """Return an error's text with each word that has a digit replaced by ``#``.

    Such words may differ between errors of the same cause.
    """
    return re.sub(r"\w*\d\w*", "#", error)


class RepeatedWarnings:
    """Counts the errors of one worker by kind, and logs the first of each kind."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def add(self, attempt_id: str, error: BaseException) -> None:
        """Log the first error of a kind in full, and the 10th, 100th, 1000th and so on as a count."""
        # Ids and numbers differ between errors of one cause, so they do not count.
        kind = kind_of(f"{type(error).__name__}: {error}")
        self._counts[kind] += 1
        self._first.setdefault(kind, str(error))
        count = self._counts[kind]
        if count == 1:
            _LOG.warning("attempt %s could not be run or judged", attempt_id, exc_info=error)
        # Powers of ten: enough to see that it goes on, too few to fill a terminal.
        elif str(count).strip("0") == "1":
            _LOG.warning("%d attempts by now could not be run or judged for one reason: %s", count, self._first[kind])

    def conclude(self) -> None:
        """Log the count of each kind of error that occurred more than once, and reset all counts."""
        for kind, count in self._counts.items():
            if count > 1:
                _LOG.warning(
                    "%d attempts in all could not be run or judged for one reason: %s", count, self._first[kind]
                )
        self._counts.clear()
        self._first.clear()
