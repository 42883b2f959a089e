"""The store contract: a queue of rollouts, the spans that they record, and the state of experiments.

Invariants, each a test of ``agl_testing.StoreConformance``:

- An acknowledged write survives ``kill -9`` (durable stores).
- Callers choose the ids. Writing an id again with equal content is harmless; with other content it raises
  :class:`~agl.errors.ConflictError`. Ids and names have 1 to 256 characters, without slashes, control characters and
  lone surrogates; other ids raise :class:`~agl.errors.InvalidIdError`.
- An attempt whose lease lapsed becomes ``lost``, and one that outlived ``retry.timeout_s`` becomes ``timeout``. Its
  rollout is then queued again or fails, as its retry policy says. All this happens even while a caller waits, not only
  at the next call.
- Late writes never change an outcome: ``finish`` of a decided attempt raises :class:`~agl.errors.FencedError`
  unless it repeats the recorded outcome. Spans that are appended late are kept and marked ``is_late``.
- Waiting callers are woken; they do not poll. Returned values never alias stored ones. Unknown ids raise
  :class:`~agl.errors.NotFoundError` with the id. The cost of an operation does not grow with the size of the store.
- One store object may be used from several threads and event loops at once.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Protocol, TypeAlias

import msgspec
from msgspec.structs import replace

from agl.contracts._statistics import Moments, Statistics
from agl.schemas import (
    Attempt,
    Blob,
    Claim,
    Int64,
    Json,
    Mode,
    Outcome,
    Record,
    ResourceVersion,
    Rollout,
    RolloutStatus,
    Span,
)

# Large enough that the cost of a request is small against that of its page; small enough that the
# pages of a dozen readers fit into a small machine's memory.
PAGE_BYTES = 32 << 20
"""Default limit for a page of recordings, in bytes of spans."""

MAX_BLOB_BYTES = 20_000_000
"""Size of the largest blob that a store accepts, in bytes."""

# 63 bits: SQLite's and PostgreSQL's integers are signed.
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""An integer that every store can hold; stores raise :class:`~agl.errors.StoreError` for other integers."""


class Change(Record, frozen=True, kw_only=True):
    """One entry of the change feed.

    Attributes:
        cursor: Position in the feed; strictly increasing over all changes of a store.
        kind: ``rollout`` for a changed rollout, ``spans`` for spans that were appended to an attempt, or ``resource``
            for a published version.
        key: The rollout id; for ``resource``, the resource's name.
        status: The rollout's status after the change; for ``resource``, the version.
    """

    cursor: int
    kind: Literal["rollout", "spans", "resource"]
    key: str
    attempt_id: str = ""
    status: str = ""
    experiment: str = ""


class RolloutQuery(Record, frozen=True, kw_only=True):
    """Selects rollouts, and sorts them by the field ``sort`` and then by id; descending if ``is_newest_first``.

    Attributes:
        contains: A text that the rollout's id, or its task as JSON, must contain. The store searches all rollouts that
            the other fields select.
        sort: The field to sort by. A rollout whose field is an unset time comes before all others.
        after: Id of the last rollout on the previous page; :meth:`next` sets it.
        after_value: The previous page's last value of the field ``sort``; :meth:`next` sets it.
    """

    experiment: str | None = None
    status: tuple[RolloutStatus, ...] = ()
    mode: Mode | None = None
    group_id: str | None = None
    ids: tuple[str, ...] = ()
    contains: str = ""
    sort: Literal["rollout_id", "created_at", "finished_at", "status"] = "rollout_id"
    # A page starts at a value and not at an offset, so that rollouts that are added or removed
    # meanwhile do not shift the pages.
    after: str = ""
    after_value: str | float = ""
    limit: Count = 1000
    is_newest_first: bool = False

    def next(self, last: Rollout) -> "RolloutQuery":
        """The query for the page that follows the rollout ``last``, even if that rollout has changed since."""
        return replace(self, after=last.rollout_id, after_value=getattr(last, self.sort))


class SpanQuery(Record, frozen=True, kw_only=True):
    """Selects spans of one attempt per rollout whose ``sequence`` is above ``after``; empty fields select all spans.

    Attributes:
        attempt_id: The attempt; by default each rollout's deciding or running attempt. ``""`` selects the spans that
            belong to a rollout but to none of its attempts.
        name: The full name of the span.
        contains: A text that the name contains.
        agent: The nearest agent around the span; without an agent, the nearest node, role or operation.
        kind: ``call``, ``reward``, or the last word of the operation by the GenAI conventions, such as ``agent``,
            ``tool``, ``node``, ``workflow`` or ``handoff``.
    """

    attempt_id: str | None = None
    name: str = ""
    contains: str = ""
    agent: str = ""
    kind: str = ""
    after: Count = 0
    limit: Count = 1000


SpanChoice: TypeAlias = Literal["none", "deciding", "all"] | SpanQuery
"""The spans to include in a recording: none, all, those of the deciding or running attempt, or a query's page."""


class Recording(Record, frozen=True, kw_only=True):
    """A rollout with its attempts, first to last, and its spans. Episodes are built from recordings.

    Attributes:
        is_whole: Whether ``spans`` holds all requested spans. If not, :func:`agl.stores.read_recordings` reads the
            rest; with a :class:`SpanQuery`, request the next page with ``after`` set to the last span's ``sequence``.
    """

    rollout: Rollout
    attempts: list[Attempt]
    spans: list[Span] = []
    # An attempt may have more spans than fit on a page; a reader that ignores this would judge a
    # rollout by a part of its spans.
    is_whole: bool = True


class LabelMove(Record, frozen=True, kw_only=True, omit_defaults=False):
    """One move of a label, such as ``production``, to a version of a resource.

    Attributes:
        name: The resource's name.
        moved_at: Unix seconds by the store's clock, increasing over the moves of a label.
        is_back: Whether this move is a rollback to the version that the label pointed at before.
        reason: The reason for the move, as text.
    """

    name: str
    label: str
    version: str
    moved_at: float = 0.0
    is_back: bool = False
    reason: str = ""


class VersionScore(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The mean reward of a resource's version, with its 95 % interval from ``low`` to ``high``.

    Attributes:
        n: Number of tasks that were measured.
        how: The origin of the rewards, such as ``fresh rollouts``. ``selection`` stands for the rewards by which the
            version was chosen among others; their mean is biased in its favour.
        parts: The parts of these rewards by name; empty for rewards without parts.
    """

    name: str
    version: str
    mean: float
    low: float
    high: float
    n: Int64
    how: str
    parts: dict[str, Moments] = {}


class ExperimentRecord(Record, frozen=True, kw_only=True):
    """The state of an experiment between two steps.

    Attributes:
        run: Number of the run, which is the count of fresh starts, from 1; it is part of every rollout's id.
        status: ``finished`` once every algorithm has finished; until then the experiment may be resumed.
        live: The live version of every resource, by the resource's name.
        turn: Number of steps that all algorithms have taken together.
        agent: The experiment's agent, such as ``module:function``; ``""`` in the record of a trial.
    """

    name: str
    run: Int64 = 1
    # There is no "failed": a run that stopped for any reason may be resumed, and only its end is
    # final.
    status: Literal["running", "finished"] = "running"
    live: dict[str, str] = {}
    turn: Int64 = 0
    agent: str = ""


class Trained(Record, frozen=True, kw_only=True):
    """An entry of the ledger: the rollouts that a step of an algorithm trained on."""

    experiment: str
    run: Int64
    algorithm: str
    step: Int64
    rollout_ids: tuple[str, ...]


class Presence(Record, frozen=True, kw_only=True):
    """The lease of one member of an experiment, which the member renews while it lives.

    Attributes:
        member: ``""`` for the trainer, which is the only owner of the experiment; a worker's name for a worker.
        session: The trainer's name, which is different at every start of the experiment; a worker has the session of
            its trainer.
        since: Unix seconds at which the member started, by the member's clock.
        seen_at: Unix seconds of the last renewal, by the store's clock; set by the store.
        lease_s: Seconds without a renewal after which the member counts as gone.
        details: The addresses and settings that others need to join; never a secret.
    """

    experiment: str
    member: str = ""
    session: str
    since: float = 0.0
    # By the store's clock, because the clocks of two machines may differ by more than a lease.
    seen_at: float = 0.0
    lease_s: float = 15.0
    details: dict[str, Json] = {}


class Metric(Record, frozen=True, kw_only=True, omit_defaults=False):
    """One logged number; it replaces the earlier one of the same experiment, run, algorithm, step and name.

    Attributes:
        step: The algorithm's own step, from 1; for a validation, the number of steps of all algorithms before it.
        run: The run of the experiment, see :attr:`ExperimentRecord.run`.
        experiment_step: Number of steps of all algorithms, including this one: an axis on which the numbers of several
            algorithms can be compared. ``None`` if it is not known, as in records of older releases.
    """

    experiment: str
    algorithm: str
    step: Int64
    name: str
    value: float
    time: float = 0.0
    run: Count = 1
    # Algorithms that take turns have steps of their own; on this axis their curves can be laid over
    # each other.
    experiment_step: Count | None = None


class Store(Protocol):
    """The contract of stores. Every method is asynchronous, may be called concurrently, and is safe to repeat."""

    # Rollouts and their attempts

    async def enqueue(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Queue rollouts in order; return the stored rollouts, with a known id in its current state."""
        ...

    async def claim(
        self,
        *,
        worker: str,
        limit: Count = 1,
        lease_s: float = 60.0,
        wait_s: float = 0.0,
        experiment: str | None = None,
        # Named by the caller, so that a claim whose answer was lost on the way can be repeated:
        # otherwise the rollouts would wait for their leases to lapse.
        claim_id: str = "",
    ) -> list[Claim]:
        """Open attempts for up to ``limit`` of the oldest queued rollouts.

        Waits up to ``wait_s`` seconds for the first rollout. Repeating a call with the same non-empty ``claim_id``
        returns all attempts that are still running under this id, whatever the ``limit``, so that a lost answer loses
        no rollout. If the caller is cancelled and gave no ``claim_id``, the rollouts stay queued; if it gave one, the
        attempts stay open for a repetition until their leases lapse.
        """
        ...

    async def renew(self, attempt_ids: Sequence[str], *, lease_s: float = 60.0) -> list[str]:
        """Extend the leases of attempts, and return the ids of the attempts that the caller still holds.

        An attempt that is missing from the result was lost, cancelled or otherwise decided.
        """
        ...

    async def finish(self, outcomes: Sequence[Outcome]) -> list[Rollout]:
        """Append each outcome's spans and decide its attempt, in one transaction; returns the updated rollouts."""
        ...

    async def cancel(self, rollout_ids: Sequence[str]) -> list[Rollout]:
        """Cancel rollouts; finished rollouts stay as they are."""
        ...

    async def delete(self, rollout_ids: Sequence[str]) -> int:
        """Remove finished rollouts, their attempts, spans and unshared blobs; returns the number of removed rollouts.

        If a rollout is not finished, it raises :class:`~agl.errors.ConflictError` and removes nothing. A rollout whose
        record cannot be read is removed unless it runs; its numbers stay in the statistics, and in the counts of a
        store that counts by them.
        """
        ...

    async def rollouts(self, query: RolloutQuery) -> list[Rollout]:
        """One page of rollouts; raises :class:`NotFoundError` for an unknown id in ``query.ids``."""
        ...

    async def count_rollouts(self, query: RolloutQuery) -> int:
        """The number of rollouts on all pages of a query; the cost grows with that number."""
        ...

    async def statistics(self, experiment: str | None = None) -> list[Statistics]:
        """Sums over finished rollouts, per experiment, algorithm, step and mode; of one experiment or of all.

        The sums are updated in the transaction that finishes or removes a rollout or accepts a late reward. Reading
        them costs one record per step and mode, however many rollouts and spans there are.
        """
        ...

    async def attempts(self, rollout_id: str) -> list[Attempt]:
        """All attempts of a rollout, first to last."""
        ...

    async def recordings(
        self, query: RolloutQuery, *, spans: SpanChoice = "deciding", max_bytes: int = PAGE_BYTES
    ) -> list[Recording]:
        """One page of rollouts with their attempts and with the spans that ``spans`` selects.

        With a :class:`SpanQuery`, each rollout has one page of the selected spans, which may be empty. With ``all``,
        spans that belong to no attempt come first. With ``none``, the attempts of many rollouts can be read cheaply.
        The page ends early, but has at least one rollout, once its spans exceed ``max_bytes``; request the following
        rollouts with :meth:`RolloutQuery.next`.
        """
        ...

    # Spans and the change feed

    async def append_spans(self, spans: Sequence[Span]) -> None:
        """Append spans in order; a span whose id the attempt already has is ignored."""

    async def spans(
        self, rollout_id: str, *, attempt_id: str | None = None, after: Count = 0, limit: Count = 10_000
    ) -> list[Span]:
        """Spans of one attempt with a ``sequence`` above ``after``; by default of the deciding or running attempt.

        With ``attempt_id=""`` it returns the spans that belong to the rollout but to no attempt: late rewards from
        outside for a rollout that was never started.
        """
        ...

    async def changes(self, *, after: Count = 0, limit: Count = 1000, wait_s: float = 0.0) -> list[Change]:
        """Changes with a cursor above ``after``, in order; waits up to ``wait_s`` seconds if there is none yet."""
        ...

    async def cursor(self) -> int:
        """The cursor of the newest change; 0 if there is no change yet."""
        ...

    # Pictures and other payloads of model calls

    async def save_blobs(self, blobs: Sequence[Blob]) -> None:
        """Store payloads, each digest once.

        Save the payloads of a call before its span is appended, and again if an hour has passed since. :meth:`delete`
        removes a blob to which the ``inputs`` and ``media`` of no remaining call refer, unless it was saved in the last
        hour.

        Raises:
            ConflictError: A digest is not that of its data; nothing is saved.
            StoreError: A blob is larger than :data:`MAX_BLOB_BYTES`; nothing is saved.
        """

    async def blobs(self, digests: Sequence[str]) -> list[Blob]:
        """The stored blobs with these digests, in the order of ``digests``; those that are not stored are left out."""
        ...

    # Resources, their labels and scores

    async def publish(self, versions: Sequence[ResourceVersion]) -> None:
        """Add resource versions; a rollout that pins no version of a resource gets the newest one."""

    async def resource(self, name: str, version: str | None = None) -> ResourceVersion:
        """One version of a resource, the newest by default."""
        ...

    async def resources(self, name: str | None = None) -> list[ResourceVersion]:
        """All versions of the resource ``name`` in order of publication; for ``None``, the newest of every resource."""
        ...

    async def move_label(self, move: LabelMove) -> LabelMove:
        """Point a label at an existing version; returns the stored move.

        If the label already points at that version, nothing changes and the label's last move is returned. The store
        keeps every move, and orders the moves of processes that move a label at once.
        """
        ...

    async def label_moves(self, name: str, label: str) -> list[LabelMove]:
        """Every move of a label, oldest first; an empty list for a label that does not exist."""
        ...

    async def labels(self, name: str | None = None) -> list[LabelMove]:
        """The newest move of every label of a resource, or of all resources, sorted by name and label."""
        ...

    async def save_scores(self, scores: Sequence[VersionScore]) -> None:
        """Save scores of existing versions; each replaces the earlier score of its version."""

    async def scores(self, name: str) -> list[VersionScore]:
        """The scores of a resource's versions, sorted by version; versions that were never measured are left out."""
        ...

    # Experiments

    async def save_state(
        self,
        states: Mapping[str, bytes],
        *,
        experiment: ExperimentRecord | None = None,
        trained: Sequence[Trained] = (),
        # Two trainers may both believe that they own an experiment, and only one of them may save.
        leases: Sequence[Presence] = (),
    ) -> None:
        """Write algorithm states by key, the experiment's record and new ledger entries, in one transaction.

        An empty value deletes its key. ``leases`` are presences that the store must still hold with the same sessions.

        Raises:
            ConflictError: A rollout in ``trained`` was trained on by another step of the same algorithm and run.
            FencedError: The store holds a lease for another session, or for none.
        """

    async def load_state(self, prefix: str) -> dict[str, bytes]:
        """All states whose keys start with ``prefix``, by key and sorted by it."""
        ...

    async def experiments(self, name: str | None = None) -> list[ExperimentRecord]:
        """All experiments, sorted by name, or only the one called ``name``; empty if that experiment never ran."""
        ...

    async def trained(
        self, experiment: str, *, run: int, algorithm: str, rollout_ids: Sequence[str] | None = None
    ) -> dict[str, int]:
        """The step that trained on each rollout, by rollout id; by default for all rollouts of the ledger."""
        ...

    async def announce(self, presence: Presence, *, replaces: str | None = None) -> None:
        """Announce that a member of an experiment lives; replaces the member's earlier announcement.

        With ``replaces``, the store must hold the member's presence with this session (``""``: no presence), or with
        the session of ``presence``. Of several concurrent calls that replace the same session, one succeeds.

        Raises:
            FencedError: The store holds the presence of another session, or none.
        """

    async def withdraw(self, experiment: str, members: Sequence[str]) -> None:
        """Remove the presences of members; unknown members are ignored."""

    async def presences(self, experiment: str, *, member: str | None = None) -> list[Presence]:
        """The presences of an experiment, sorted by member, or only that of ``member``; killed members are included."""
        ...

    async def log_metrics(self, metrics: Sequence[Metric]) -> None:
        """Save numbers; each replaces an earlier one of the same experiment, run, algorithm, step and name."""

    async def metrics(self, experiment: str, *, name: str | None = None, run: Count | None = None) -> list[Metric]:
        """The numbers of one run of the experiment, or of all runs, sorted by (run, algorithm, step, name)."""
        ...

    async def close(self) -> None:
        """Finish open writes and release all resources; idempotent.

        Waiting calls raise :class:`~agl.errors.StoreError`.
        """
