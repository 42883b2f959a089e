"""Counts the rollouts of a run, and reports the errors of those that failed."""

import logging
from collections import Counter
from collections.abc import Iterable
from typing import TypeAlias

from agl.errors import RunError
from agl.hints import count_of
from agl.schemas import Attempt, Episode, Rollout
from agl_inspect.records.names import error_of
from agl_inspect.stores import proposal
from agl_run.runners.repeats import kind_of
from agl_run.watch.observers import Batch, Observer

_LOG = logging.getLogger("agl_run.run")

Ended: TypeAlias = tuple[Rollout, Attempt | None]
"""A finished rollout and its deciding attempt; ``None`` if it has no attempt."""

MOST_FREQUENT = 3
"""The most kinds of errors that a message names."""


class RolloutCounts:
    """Counts rollouts, and their errors by kind: the type and first line, without regard to numbers."""

    def __init__(self, ended: Iterable[Ended] = ()) -> None:
        self.total = 0
        self._errors: Counter[str] = Counter()
        self._first: dict[str, tuple[str, str]] = {}
        self.add(ended)

    @property
    def failed(self) -> int:
        """The number of rollouts that did not succeed."""
        return self._errors.total()

    @property
    def all_failed(self) -> bool:
        """True if there is at least one rollout and no rollout succeeded."""
        return 0 < self.total == self.failed

    @property
    def example(self) -> str:
        """Id of a rollout with the most frequent error; ``""`` if no rollout failed."""
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
        """Add finished rollouts to the counts."""
        for rollout, attempt in ended:
            self.total += 1
            if rollout.status != "succeeded":
                text = error_of(rollout, attempt)
                # Errors that differ in ids or numbers have one cause.
                kind = kind_of(text)
                self._errors[kind] += 1
                self._first.setdefault(kind, (text, rollout.rollout_id))

    def warn(self, store_url: str) -> None:
        """Log a warning with the number of failed rollouts, their most frequent errors and an example."""
        if not self.failed:
            return
        if self.all_failed:
            found = f"none of {count_of(self.total, 'rollout')} succeeded: {self.errors}"
        else:
            found = f"{self.failed} of {count_of(self.total, 'rollout')} failed, most often with {self.most_frequent}"
        _LOG.warning("%s.%s", found, self.look_at(store_url))

    def look_at(self, store_url: str) -> str:
        """Return a sentence with the command that shows the example rollout; ``""`` for a store in memory."""
        return proposal("Look at one with", "show", self.example, store_url=store_url)

    def _named(self, limit: int) -> str:
        return ", ".join(f"{self._first[kind][0]} ({count})" for kind, count in self._errors.most_common(limit))


class FailureReport(Observer):
    """Counts all rollouts of a run, and reports the failed ones at its end.

    Args:
        store_url: The store's URL, for the commands in the report.

    Attributes:
        counts: The rollouts so far.
    """

    def __init__(self, *, store_url: str = "") -> None:
        self._store_url = store_url
        self.counts = RolloutCounts()
        self._training = RolloutCounts()

    def batch(self, batch: Batch) -> None:
        """Count the rollouts of one request."""
        if batch.is_own:
            ended = [(episode.rollout, episode.attempt) for episode in batch.episodes]
            self.counts.add(ended)
            self._training.add(ended if batch.mode != "val" else ())

    def end(self) -> None:
        """Log a warning if some rollouts failed.

        Raises:
            RunError: All rollouts failed, or all rollouts of training tasks; the message names the commonest errors, an
                example and the next step.
        """
        for counts, where in ((self.counts, ""), (self._training, " on training tasks")):
            if counts.all_failed:
                raise RunError(
                    f"none of {count_of(counts.total, 'rollout')}{where} succeeded: {counts.errors}. Correct the agent "
                    f"or the reward, then run it again with --fresh (fresh=True).{counts.look_at(self._store_url)}"
                )
        self.counts.warn(self._store_url)


def warn_of_failures(episodes: Iterable[Episode], *, store_url: str) -> None:
    """Log how many rollouts failed and why; for scripts that print no result."""
    RolloutCounts((episode.rollout, episode.attempt) for episode in episodes).warn(store_url)
