"""Counts the rollouts of a run, and reports the errors of those that failed."""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from agl.errors import RunError
from agl.schemas import Attempt, Rollout
from agl_run.runners.repeats import kind_of

_LOG = logging.getLogger("agl_run.experiment")

Ended: TypeAlias = tuple[Rollout, Attempt | None]
"""A finished rollout and the attempt that decided it, if there was one."""

MOST_FREQUENT = 3
"""Errors that a message names."""

MAX_ERROR = 500
"""Characters of an error's first line that a message shows."""


class RolloutCounts:
    """Counts rollouts, and their errors by type and first line; errors that differ in numbers only count as one."""

    def __init__(self, ended: Iterable[Ended] = ()) -> None:
        self.total = 0
        self._errors: Counter[str] = Counter()
        self._first: dict[str, tuple[str, str]] = {}
        self.add(ended)

    @property
    def failed(self) -> int:
        """Rollouts that did not succeed."""
        return self._errors.total()

    @property
    def all_failed(self) -> bool:
        """True if there are rollouts and none succeeded."""
        return 0 < self.total == self.failed

    @property
    def example(self) -> str:
        """Id of a rollout with the most frequent error; ``""`` if none failed."""
        return next((self._first[kind][1] for kind, _ in self._errors.most_common(1)), "")

    @property
    def errors(self) -> str:
        """The most frequent errors with their counts: ``ValueError: no answer (10), KeyError: 'x' (2)``."""
        more = self.failed - sum(count for _, count in self._errors.most_common(MOST_FREQUENT))
        return f"{self._named(MOST_FREQUENT)}{f', other errors ({more})' if more else ''}"

    @property
    def most_frequent(self) -> str:
        """The most frequent error with its count."""
        return self._named(1)

    def add(self, ended: Iterable[Ended]) -> None:
        """Count further rollouts."""
        for rollout, attempt in ended:
            self.total += 1
            if rollout.status != "succeeded":
                text = _error_of(rollout, attempt)
                kind = kind_of(text)
                self._errors[kind] += 1
                self._first.setdefault(kind, (text, rollout.rollout_id))

    def _named(self, limit: int) -> str:
        return ", ".join(f"{self._first[kind][0]} ({count})" for kind, count in self._errors.most_common(limit))


class FailureReport:
    """Counts all rollouts of a run, and reports at its end those that failed."""

    def __init__(self) -> None:
        self._all = RolloutCounts()
        self._training = RolloutCounts()

    def add(self, ended: Sequence[Ended], *, is_validation: bool) -> None:
        """Count the rollouts of one request."""
        self._all.add(ended)
        if not is_validation:
            self._training.add(ended)

    def conclude(self) -> None:
        """Log a warning if some rollouts failed.

        Raises:
            RunError: All failed, or all on training tasks; names the most frequent errors, an example, the next step.
        """
        for counts, where in ((self._all, ""), (self._training, " on training tasks")):
            if counts.all_failed:
                raise RunError(
                    f"none of {counts.total} rollouts{where} succeeded: {counts.errors}. Correct the agent or the "
                    f"reward, then run it again with --fresh (fresh=True). Look at one with: agl show {counts.example}"
                )
        if self._all.failed:
            found = (
                f"{self._all.failed} of {self._all.total} rollouts failed, most often with {self._all.most_frequent}"
            )
            _LOG.warning("%s. Look at one with: agl show %s", found, self._all.example)


def _error_of(rollout: Rollout, attempt: Attempt | None) -> str:
    """Return an error's type and the first line of its message."""
    error = attempt.error if attempt else None
    if error is None:
        return f"{rollout.status} without an error"
    kind = "" if error.type == "agl.errors.RunError" else f"{error.type}: "  # whose message says all
    text = f"{kind}{error.message.strip()}".splitlines()[0]
    return text if len(text) <= MAX_ERROR else f"{text[:MAX_ERROR]}…"
