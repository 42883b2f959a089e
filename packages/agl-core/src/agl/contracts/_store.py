"""The store contract: a queue of rollouts, the spans that they record, and the state of experiments.

Invariants, each a test of ``agl_testing.StoreConformance``:

- An acknowledged write survives ``kill -9`` (durable stores).
- Ids come from the caller; a repeated write with equal content is harmless, with other content a
  :class:`~agl.errors.ConflictError`. Ids and names have 1 to 256 characters, without slashes, control characters and
  halves of characters; others raise :class:`~agl.errors.InvalidIdError`.
- An attempt whose lease lapsed, or that outlived ``retry.timeout_s``, is ``lost`` or ``timeout``; its rollout is
  queued again or failed by its retry policy. This also happens while a caller waits, not only at the next call.
- Late writes never change an outcome: ``finish`` of a decided attempt raises :class:`~agl.errors.FencedError`
  unless it repeats the recorded outcome; spans appended late are kept and marked ``is_late``.
- Waiting is by wake-up. Returned values never alias stored ones. Unknown ids raise
  :class:`~agl.errors.NotFoundError` with the id. No operation costs more because the store is larger.
- One object may be used from several threads and event loops at once.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Protocol, TypeAlias

import msgspec
from msgspec.structs import replace

from agl.contracts._statistics import Statistics
from agl.schemas import Attempt, Claim, Json, Mode, Outcome, Record, ResourceVersion, Rollout, RolloutStatus, Span

# Large enough that a page costs little beside its request, small enough that a dozen readers at
# once fit into a small machine's memory.
PAGE_BYTES = 32 << 20
"""Bytes of spans after which a page of recordings ends."""

# 63 bits: SQLite's and PostgreSQL's integers are signed.
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A number that every store can count to; stores refuse others with a :class:`~agl.errors.StoreError`."""


class Change(Record, frozen=True, kw_only=True):
    """One entry of the change feed.

    Attributes:
        cursor: Position; strictly increasing over all changes of a store.
        kind: The kind of change; ``spans`` says that spans were appended to the attempt.
        key: The rollout id, or the resource's name.
        status: The rollout's status after the change, or the resource's version.
    """

    cursor: int
    kind: Literal["rollout", "spans", "resource"]
    key: str
    attempt_id: str = ""
    status: str = ""
    experiment: str = ""


class RolloutQuery(Record, frozen=True, kw_only=True):
    """Selects rollouts to list, in order of ``sort`` and then of id, descending with ``is_newest_first``.

    Attributes:
        contains: A text in the rollout's id or in its task as JSON. The store looks through all rollouts that the other
            fields select.
        sort: The field to sort by; a rollout without that time comes before all others.
        after: The last id of the page before, and ``after_value`` its field to sort by; :meth:`next` sets both.
    """

    experiment: str | None = None
    status: tuple[RolloutStatus, ...] = ()
    mode: Mode | None = None
    group_id: str | None = None
    ids: tuple[str, ...] = ()
    contains: str = ""
    sort: Literal["rollout_id", "created_at", "finished_at", "status"] = "rollout_id"
    # A position by value and not by number: rollouts that arrive or vanish meanwhile do not shift
    # the pages.
    after: str = ""
    after_value: str | float = ""
    limit: Count = 1000
    is_newest_first: bool = False

    def next(self, last: Rollout) -> "RolloutQuery":
        """The query of the page behind the rollout ``last``, wherever that rollout is by then."""
        return replace(self, after=last.rollout_id, after_value=getattr(last, self.sort))


class SpanQuery(Record, frozen=True, kw_only=True):
    """Selects spans of one attempt of each rollout, by ``sequence`` above ``after``; empty fields select all.

    Attributes:
        attempt_id: The attempt; by default the deciding or running one of each rollout, and ``""`` for the spans that
            belong to the rollout alone.
        name: The whole name.
        contains: A part of the name.
        agent: The nearest agent around the span, or without one the nearest node, role or operation.
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
"""The spans that come with a recording: none, those of the deciding or running attempt, all, or one page of some."""


class Recording(Record, frozen=True, kw_only=True):
    """A rollout with its attempts, first to last, and its spans, from which an episode is built.

    Attributes:
        is_whole: Whether these are all of the spans that were asked for; :func:`agl.stores.read_recordings` reads the
            rest. The next page of a :class:`SpanQuery` comes ``after`` the last one's ``sequence``.
    """

    rollout: Rollout
    attempts: list[Attempt]
    spans: list[Span] = []
    # An attempt may have more spans than a page takes; a reader that ignores this would judge a
    # rollout by a part of it.
    is_whole: bool = True


class LabelMove(Record, frozen=True, kw_only=True, omit_defaults=False):
    """One move of a label, such as ``production``, to a version of a resource.

    Attributes:
        name: The resource's name.
        moved_at: Unix seconds by the store's clock, increasing over the moves of a label.
        is_back: Whether this is a roll-back to the version that the label pointed at before.
        reason: The reason in words, given by the mover.
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
        n: Tasks that were measured.
        how: The origin of the rewards, such as ``fresh rollouts``, or ``selection`` for those by which the version
            was chosen among others, which flatter the chosen one.
    """

    name: str
    version: str
    mean: float
    low: float
    high: float
    n: int
    how: str


class ExperimentRecord(Record, frozen=True, kw_only=True):
    """An experiment between two steps.

    Attributes:
        run: Counts fresh starts, from 1; part of every rollout's id.
        status: ``finished`` once every algorithm is; until then the experiment may be resumed.
        live: The live version of every resource.
        turn: Steps taken by all algorithms together.
        owner: Worker name of the process that runs or ran it.
        agent: The agent that it runs, such as ``module:function``; ``""`` in records of older releases.
    """

    name: str
    run: int = 1
    # There is no "failed": a run that stopped for any reason may be resumed, and only its end is
    # final.
    status: Literal["running", "finished"] = "running"
    live: dict[str, str] = {}
    turn: int = 0
    owner: str = ""
    agent: str = ""


class Trained(Record, frozen=True, kw_only=True):
    """An entry of the ledger: the rollouts that a step of an algorithm trained on."""

    experiment: str
    run: int
    algorithm: str
    step: int
    rollout_ids: tuple[str, ...]


class Presence(Record, frozen=True, kw_only=True):
    """The sign of life of one member of a running experiment.

    Attributes:
        member: ``""`` for the process that runs the experiment, a worker's name for any other process.
        session: Random; every start of the experiment has its own.
        since: Unix seconds by the member's clock.
        seen_at: Unix seconds by the store's clock at this sign of life; set by the store.
        beat: Counts while the member lives, so that a killed one is recognised without comparing clocks.
        details: The addresses and settings that others need to join; never a key.
    """

    experiment: str
    member: str = ""
    session: str
    since: float = 0.0
    # By the store's clock, because the clocks of two machines may differ by more than a lease.
    seen_at: float = 0.0
    # A reader compares it with the beat that it saw before, and needs no clock to see whether the
    # member lives.
    beat: int = 0
    details: dict[str, Json] = {}


class Metric(Record, frozen=True, kw_only=True, omit_defaults=False):
    """One logged number. Unique by (experiment, run, algorithm, step, name): logging again replaces it.

    Attributes:
        step: The algorithm's own step, from 1; of a validation the steps of all algorithms before it, from 0.
        run: The run of the experiment, :attr:`ExperimentRecord.run`.
        experiment_step: Steps of all algorithms together, this one included: the axis on which numbers of several
            algorithms compare. ``None`` if it is not known, as in numbers that older releases logged.
    """

    experiment: str
    algorithm: str
    step: int
    name: str
    value: float
    time: float = 0.0
    run: Count = 1
    # Algorithms that take turns have steps of their own; on this axis their curves can be laid over
    # each other.
    experiment_step: Count | None = None


class Store(Protocol):
    """Asynchronous and batch-first; every method may be called concurrently and repeated safely."""

    # Rollouts and their attempts

    async def enqueue(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Queue rollouts in order; returns them as stored, an already known id as it stands now."""
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

        Waits up to ``wait_s`` seconds for the first one. The same non-empty ``claim_id`` again returns the
        attempts that are still running under it, so that a lost answer loses no rollout. A caller that is cancelled
        leaves the rollouts queued; with a ``claim_id`` the attempts stay open for a repetition, which returns all of
        them whatever its ``limit``, until their leases lapse.
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

    async def delete(self, rollout_ids: Sequence[str]) -> int:
        """Remove finished rollouts with their attempts and spans; returns how many it removed.

        Raises :class:`~agl.errors.ConflictError` for one that is not finished, and then removes none.
        """
        ...

    async def rollouts(self, query: RolloutQuery) -> list[Rollout]:
        """One page of rollouts; ``query.ids`` that are unknown raise :class:`NotFoundError`."""
        ...

    async def count_rollouts(self, query: RolloutQuery) -> int:
        """The number of rollouts on all pages of a query; it costs more the more there are."""
        ...

    async def statistics(self, experiment: str | None = None) -> list[Statistics]:
        """The sums over finished rollouts, of one experiment or of all, by experiment, algorithm, step and mode.

        They change in the transaction that finishes a rollout, removes one or accepts a late reward. They cost one
        record per step and mode, however many rollouts and spans these have.
        """
        ...

    async def attempts(self, rollout_id: str) -> list[Attempt]:
        """All attempts of a rollout, first to last."""
        ...

    async def recordings(
        self, query: RolloutQuery, *, spans: SpanChoice = "deciding", max_bytes: int = PAGE_BYTES
    ) -> list[Recording]:
        """One page of rollouts with their attempts and spans: of the deciding or running attempt, all, none or some.

        All attempts of many rollouts come with ``spans="none"``. With a :class:`SpanQuery`, each rollout comes with
        one page of the spans that it selects, or without any. The page of rollouts ends early, with at least one
        rollout, once its spans exceed ``max_bytes``; request the rollouts behind the last one with ``query.after``.
        With ``all``, spans that belong to no attempt come first.
        """
        ...

    # Spans and the change feed

    async def append_spans(self, spans: Sequence[Span]) -> None:
        """Append in order; a span id that the attempt already has is ignored."""

    async def spans(
        self, rollout_id: str, *, attempt_id: str | None = None, after: Count = 0, limit: Count = 10_000
    ) -> list[Span]:
        """Spans of one attempt by ``sequence`` above ``after``; the deciding or running attempt by default.

        With ``attempt_id=""`` it returns the spans that belong to the rollout and to no attempt: late rewards from
        outside for a rollout that was never started.
        """
        ...

    async def changes(self, *, after: Count = 0, limit: Count = 1000, wait_s: float = 0.0) -> list[Change]:
        """Changes with a cursor above ``after``, in order; waits up to ``wait_s`` seconds for the first."""
        ...

    async def cursor(self) -> int:
        """The newest change's cursor, 0 in an empty store."""
        ...

    # Resources, their labels and scores

    async def publish(self, versions: Sequence[ResourceVersion]) -> None:
        """Add resource versions; an unpinned rollout gets the newest published one of a name."""

    async def resource(self, name: str, version: str | None = None) -> ResourceVersion:
        """One version of a resource, the newest by default."""
        ...

    async def resources(self, name: str | None = None) -> list[ResourceVersion]:
        """All versions of ``name`` in order of publication; the newest of every name for ``None``."""
        ...

    async def move_label(self, move: LabelMove) -> LabelMove:
        """Point a label at a version that exists; returns the move as stored, the last one if it points there already.

        Every move is kept. Of two processes that move a label at once, one comes after the other.
        """
        ...

    async def label_moves(self, name: str, label: str) -> list[LabelMove]:
        """Every move of a label, oldest first; none for a label that does not exist."""
        ...

    async def labels(self, name: str | None = None) -> list[LabelMove]:
        """The newest move of every label of a resource, or of all resources, sorted by name and label."""
        ...

    async def save_scores(self, scores: Sequence[VersionScore]) -> None:
        """Save scores of versions that exist; each replaces the earlier score of its version."""

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
        # Compare and set: two trainers of one experiment may both believe that they own it, and
        # only one of them may save.
        expected: Mapping[str, bytes] | None = None,
    ) -> None:
        """Write algorithm states by key, the experiment's record and its ledger, all or none.

        An empty value deletes the key. The ledger only grows: a rollout that another step of the same algorithm and
        run trained on raises :class:`~agl.errors.ConflictError`. ``expected`` are values that keys must have, empty
        for none, unless they already have the value that this call writes: a key with any other value raises
        :class:`~agl.errors.FencedError`. Of several calls at once that expect one value, one succeeds.
        """

    async def load_state(self, prefix: str) -> dict[str, bytes]:
        """All states whose key starts with ``prefix``, sorted by key."""
        ...

    async def experiments(self, name: str | None = None) -> list[ExperimentRecord]:
        """All experiments by name, or the one of that name; none if it never ran."""
        ...

    async def trained(
        self, experiment: str, *, run: int, algorithm: str, rollout_ids: Sequence[str] | None = None
    ) -> dict[str, int]:
        """The step that trained on each rollout, by rollout id; for all rollouts in the ledger, or for those given."""
        ...

    async def announce(self, presence: Presence) -> None:
        """Announce a member of an experiment, or that it lives; replaces its earlier announcement."""

    async def withdraw(self, experiment: str, members: Sequence[str]) -> None:
        """Remove members; unknown ones are ignored."""

    async def presences(self, experiment: str, *, member: str | None = None) -> list[Presence]:
        """The members of an experiment, sorted by name, or the one of that name; killed ones are included."""
        ...

    async def log_metrics(self, metrics: Sequence[Metric]) -> None:
        """Save numbers; one of the same experiment, run, algorithm, step and name replaces the earlier one."""

    async def metrics(self, experiment: str, *, name: str | None = None, run: Count | None = None) -> list[Metric]:
        """The numbers of one run of the experiment, or of all its runs, by (run, algorithm, step, name)."""
        ...

    async def close(self) -> None:
        """Flush and release; safe to call twice. Waiting calls end with :class:`~agl.errors.StoreError`."""
