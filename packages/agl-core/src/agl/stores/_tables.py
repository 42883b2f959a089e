"""The tables that a store implements, as a writing and a reading transaction see them.

The operations of :mod:`agl.stores` are written once over these protocols, for all stores. They check their arguments
before they change anything, so an operation that raises changes nothing. They wait for nothing but the database.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Protocol

from agl.contracts import Change, Metric, RolloutQuery, Statistics
from agl.errors import StoreError
from agl.schemas import Attempt, Claim, ResourceVersion, Rollout, Span
from agl.schemas import _codec as codec


class Tables(Protocol):
    """A store's data, as a writing transaction sees it. Every change of a rollout is logged on the change feed.

    States, labels, scores, ledgers and presence are stored as documents.

    Attributes:
        now: The transaction's time, in Unix seconds; leases and time limits follow it.
    """

    now: float

    def rollout(self, rollout_id: str) -> Rollout | None:
        """The rollout with this id; ``None`` for an unknown id."""
        ...

    def held(self, attempt_id: str) -> Claim | None:
        """The attempt with this id, decided or not, with its rollout; ``None`` for an unknown id."""
        ...

    def queued(self, experiment: str | None, limit: int) -> list[Rollout]:
        """The oldest queued rollouts, in order of their first enqueueing."""
        ...

    def claimed(self, claim_id: str) -> list[Claim]:
        """Attempts that were opened under a claim id and still run, in order of their rollouts' first enqueueing."""
        ...

    def overdue(self) -> list[Claim]:
        """Running attempts whose deadline has passed, the longest overdue first."""
        ...

    def is_running(self, rollout_id: str) -> bool:
        """True if an attempt of the rollout runs, also if the rollout's record cannot be read."""
        ...

    def version(self, name: str, version: str) -> ResourceVersion | None:
        """This version of a resource; ``None`` if it was never published."""
        ...

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Put new rollouts at the end of the queue."""

    def save(self, claims: Sequence[Claim], *, is_logged: bool = True) -> None:
        """Save new and known attempts; with ``is_logged``, also save their rollouts and log them on the change feed."""

    def save_rollouts(self, rollouts: Sequence[Rollout]) -> None:
        """Save rollouts; remove their attempts with numbers above ``Rollout.attempts``, which no claimer received."""

    def insert_spans(self, spans: Sequence[Span]) -> list[Span]:
        """Append spans of known attempts, except those that are stored already; returns the new spans as stored."""
        ...

    def add_statistics(self, shares: Sequence[Statistics]) -> None:
        """Add shares of rollouts to the statistics of their steps; a negative share removes its rollout."""

    def remove(self, rollouts: Sequence[Rollout]) -> None:
        """Remove rollouts with their attempts, their spans and their entries on the change feed."""

    def add_version(self, version: ResourceVersion) -> None:
        """Add a resource version as the newest of its name."""

    def log_metrics(self, metrics: Sequence[Metric]) -> None:
        """Save numbers; each replaces an earlier one of the same experiment, run, algorithm, step and name."""

    def get(self, key: bytes) -> bytes | None:
        """The document with this key; ``None`` for an unknown key."""
        ...

    def put(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        """Write documents by their keys."""

    def delete(self, keys: Iterable[bytes]) -> None:
        """Remove documents; unknown keys are ignored."""


class Reads(Protocol):
    """A store's data, as a reading transaction sees it.

    A database that can count without reading may also have ``count_rollouts(query)``; for others, the rollouts are read
    and counted.
    """

    def rollouts(self, query: RolloutQuery) -> list[Rollout]:
        """See :meth:`agl.contracts.Store.rollouts`."""
        ...

    def attempts(self, rollout_id: str) -> list[Attempt]:
        """See :meth:`agl.contracts.Store.attempts`."""
        ...

    def spans(
        self, rollout_id: str, *, attempt_id: str | None = None, after: int = 0, limit: int = 10_000
    ) -> list[Span]:
        """See :meth:`agl.contracts.Store.spans`."""
        ...

    def changes(self, after: int, limit: int) -> list[Change]:
        """See :meth:`agl.contracts.Store.changes`."""
        ...

    def cursor(self) -> int:
        """See :meth:`agl.contracts.Store.cursor`."""
        ...

    def version(self, name: str, version: str | None) -> ResourceVersion | None:
        """One version of a resource, the newest for ``None``."""
        ...

    def resources(self, name: str | None = None) -> list[ResourceVersion]:
        """See :meth:`agl.contracts.Store.resources`."""
        ...

    def metrics(self, experiment: str, *, name: str | None = None, run: int | None = None) -> list[Metric]:
        """See :meth:`agl.contracts.Store.metrics`."""
        ...

    def statistics(self, experiment: str | None = None) -> list[Statistics]:
        """See :meth:`agl.contracts.Store.statistics`."""
        ...

    def get(self, key: bytes) -> bytes | None:
        """The document with this key; ``None`` for an unknown key."""
        ...

    def scan(self, start: bytes, stop: bytes, *, limit: int = sys.maxsize) -> list[tuple[bytes, bytes]]:
        """Return the first ``limit`` documents with keys from ``start`` up to but excluding ``stop``, in order."""
        ...


def document(*kind: str, last: str = "") -> bytes:
    """The key of a document: its kind, then ``last``, by which documents of the same kind are sorted.

    Documents hold everything that is not a rollout, an attempt, a span, a version or a number.
    """
    try:
        return b"x" + codec.encode(kind) + last.encode()
    except UnicodeEncodeError as error:
        raise StoreError(f"{last!r} cannot be a key: {error}; it holds half of a character") from error
