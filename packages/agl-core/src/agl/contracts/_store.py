"""The store contract: where rollouts wait, spans land, and versions and states are kept.

Invariants, each a test of ``agl_testing.StoreConformance``:

- What was acknowledged survives ``kill -9`` (durable stores).
- Ids come from the caller; a repeated write with equal content is harmless, with other content a
  :class:`~agl.errors.ConflictError`.
- An attempt whose lease lapsed, or that outlived ``retry.timeout_s``, is ``lost`` or ``timeout``; its rollout is
  queued again or failed by its retry policy. This happens while somebody waits, not only when somebody calls.
- Late writes never change an outcome: ``finish`` of a decided attempt raises :class:`~agl.errors.FencedError`
  unless it repeats the recorded outcome; spans appended late are kept and marked ``is_late``.
- Waiting is by wake-up. What is returned never aliases what is stored. Unknown ids raise
  :class:`~agl.errors.NotFoundError` with the id. No operation costs more because the store is larger.
- One object may be used from several threads and event loops at once.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from agl.schemas import Attempt, Claim, Mode, Outcome, Record, ResourceVersion, Rollout, RolloutStatus, Span


class Change(Record, frozen=True, kw_only=True):
    """One entry of the change feed.

    Attributes:
        cursor: Position; strictly increasing over all changes of a store.
        kind: What changed; ``spans`` says that spans were appended to the attempt.
        key: The rollout id, or the resource's name.
        status: The rollout's status after the change, or the resource's version.
    """

    cursor: int
    kind: Literal["rollout", "spans", "resource"]
    key: str
    attempt_id: str = ""
    status: str = ""
    experiment: str = ""


class Metric(Record, frozen=True, kw_only=True):
    """One logged number. Unique by (experiment, algorithm, step, name): logging again replaces it."""

    experiment: str
    algorithm: str
    step: int
    name: str
    value: float
    time: float = 0.0


class RolloutQuery(Record, frozen=True, kw_only=True):
    """Which rollouts to list, in order of id; ``after`` is the last id of the page before."""

    experiment: str | None = None
    status: tuple[RolloutStatus, ...] = ()
    mode: Mode | None = None
    group_id: str | None = None
    ids: tuple[str, ...] = ()
    after: str = ""
    limit: int = 1000
    is_newest_first: bool = False


class Store(Protocol):
    """Asynchronous and batch-first; every method may be called concurrently and repeated safely."""

    async def enqueue(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Queue rollouts in order; returns them as stored, an already known id as it stands now."""
        ...

    async def claim(
        self,
        *,
        worker: str,
        limit: int = 1,
        lease_s: float = 60.0,
        wait_s: float = 0.0,
        experiment: str | None = None,
        claim_id: str = "",
    ) -> list[Claim]:
        """Open attempts for up to ``limit`` of the oldest queued rollouts.

        Waits up to ``wait_s`` seconds for the first one. The same non-empty ``claim_id`` again returns the
        attempts that are still running under it, so that a lost answer loses no rollout.
        """
        ...

    async def renew(self, attempt_ids: Sequence[str], *, lease_s: float = 60.0) -> list[str]:
        """Extend leases; returns the ids still held. An id that is absent was lost, cancelled or decided."""
        ...

    async def finish(self, outcomes: Sequence[Outcome]) -> list[Rollout]:
        """Append each outcome's spans and decide its attempt, atomically; returns the rollouts after it."""
        ...

    async def cancel(self, rollout_ids: Sequence[str]) -> list[Rollout]:
        """Cancel rollouts that are not finished; finished ones stay as they are."""
        ...

    async def changes(self, *, after: int = 0, limit: int = 1000, wait_s: float = 0.0) -> list[Change]:
        """Changes with a cursor above ``after``, in order; waits up to ``wait_s`` seconds for the first."""
        ...

    async def cursor(self) -> int:
        """The newest change's cursor, 0 in an empty store."""
        ...

    async def rollouts(self, query: RolloutQuery) -> list[Rollout]:
        """One page of rollouts; ``query.ids`` that are unknown raise :class:`NotFoundError`."""
        ...

    async def attempts(self, rollout_id: str) -> list[Attempt]:
        """All attempts of a rollout, first to last."""
        ...

    async def append_spans(self, spans: Sequence[Span]) -> None:
        """Append in order; a span id that the attempt already has is ignored."""
        ...

    async def spans(
        self, rollout_id: str, *, attempt_id: str | None = None, after: int = 0, limit: int = 10_000
    ) -> list[Span]:
        """Spans of one attempt by ``sequence`` above ``after``; the deciding or running attempt by default.

        With ``attempt_id=""`` the spans that belong to the rollout and to no attempt: late rewards from outside
        of a rollout that was never started.
        """
        ...

    async def publish(self, versions: Sequence[ResourceVersion]) -> None:
        """Add resource versions; the newest published one of a name is what an unpinned rollout gets."""
        ...

    async def resource(self, name: str, version: str | None = None) -> ResourceVersion:
        """One version of a resource, the newest by default."""
        ...

    async def resources(self, name: str | None = None) -> list[ResourceVersion]:
        """All versions of ``name`` in order of publication; the newest of every name for ``None``."""
        ...

    async def save_state(self, states: Mapping[str, bytes]) -> None:
        """Write algorithm states by key, all or none; an empty value deletes the key."""
        ...

    async def load_state(self, prefix: str) -> dict[str, bytes]:
        """All states whose key starts with ``prefix``, sorted by key."""
        ...

    async def log_metrics(self, metrics: Sequence[Metric]) -> None:
        """Log numbers."""
        ...

    async def metrics(self, experiment: str, *, name: str | None = None) -> list[Metric]:
        """The experiment's numbers by (algorithm, step, name)."""
        ...

    async def delete(self, rollout_ids: Sequence[str]) -> int:
        """Remove finished rollouts with their attempts and spans; returns how many there were.

        Raises :class:`~agl.errors.ConflictError` for one that is not finished, and removes none then.
        """
        ...

    async def close(self) -> None:
        """Flush and release; safe to call twice. Waiting calls end with :class:`~agl.errors.StoreError`."""
        ...
