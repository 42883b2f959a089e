"""The operations of all stores, written once over the tables that each store provides.

Every operation checks its arguments before it changes anything, so an operation that raises changes nothing. The caller
runs operations in a transaction; no operation waits.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar

from msgspec.structs import replace

from agl._actors import Enclosing
from agl.contracts import (
    PAGE_BYTES,
    ExperimentRecord,
    LabelMove,
    Metric,
    Presence,
    Recording,
    RolloutQuery,
    SpanChoice,
    SpanQuery,
    Trained,
    VersionScore,
)
from agl.errors import ConflictError, FencedError, NotFoundError, StoreError
from agl.schemas import Attempt, Claim, Outcome, Record, ResourceVersion, Rollout, Span
from agl.schemas import _codec as codec
from agl.schemas._rollout import NO_TALLY
from agl.stores import _blobs as blobs
from agl.stores import _leases as leases
from agl.stores import _queries as queries
from agl.stores import _values as values
from agl.stores._tables import Reads, Tables, document
from agl.stores._tallies import counted, share_of

R = TypeVar("R", bound=Record)

SPAN_PAGE = 10_000
"""Largest number of spans of one attempt in a recording."""

SCANNED = 16
"""The number of spans that are read at once while looking for those that a query selects."""


def closed(shown_url: str) -> StoreError:
    """The error for an operation on a store that was closed."""
    return StoreError(f"the store {shown_url} was closed; open it again, or close it after its last caller")


def unknown_resource(name: str, version: str | None) -> NotFoundError:
    """The error for a resource that was never published."""
    key = name if version is None else f"{name}@{version}"
    return NotFoundError("resource", key, "publish it first, or name it in the experiment's resources")


def unknown_attempt(rollout_id: str, attempt_id: str) -> NotFoundError:
    """The error for an attempt that does not belong to the rollout."""
    return NotFoundError("attempt", attempt_id, f"rollout {rollout_id!r} has no such attempt")


def need_rollout(tables: Tables, rollout_id: str) -> Rollout:
    """Return the rollout; raises :class:`NotFoundError` for an unknown id."""
    found = tables.rollout(rollout_id)
    if found is None:
        raise NotFoundError("rollout", rollout_id)
    return found


def need_held(tables: Tables, attempt_id: str) -> Claim:
    """Return the attempt with its rollout; raises :class:`NotFoundError` for an unknown id."""
    found = tables.held(attempt_id)
    if found is None:
        raise NotFoundError("attempt", attempt_id)
    return found


def enqueue(tables: Tables, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """See :meth:`agl.contracts.Store.enqueue`."""
    new: dict[str, Rollout] = {}
    stored: list[Rollout] = []
    for rollout in rollouts:
        known = new.get(rollout.rollout_id) or tables.rollout(rollout.rollout_id)
        if known is None:
            known = new[rollout.rollout_id] = values.new_rollout(rollout, now=tables.now)
        elif not values.is_same(values.definition(known), values.definition(rollout)):
            raise values.conflict("rollout", rollout.rollout_id)
        stored.append(known)
    tables.add(list(new.values()))
    return stored


def claim(
    tables: Tables, *, worker: str, limit: int, lease_s: float, experiment: str | None, claim_id: str
) -> list[Claim]:
    """See :meth:`agl.contracts.Store.claim`, without the waiting."""
    # The same claim again: its answer was lost. Whatever was opened then is still the caller's.
    if claim_id and (running := tables.claimed(claim_id)):
        return running
    claims = [
        leases.open_attempt(rollout, worker=worker, claim_id=claim_id, lease_s=lease_s, now=tables.now)
        for rollout in tables.queued(experiment, limit)
    ]
    tables.save(claims)
    return claims


def unclaim(tables: Tables, claims: Iterable[Claim]) -> None:
    """Undo claims that their cancelled caller never received; renewed and decided attempts stay."""
    for claim in claims:
        current = tables.held(claim.attempt.attempt_id)
        # Meanwhile it may have lapsed, or another call of the same worker may have renewed it.
        if current is not None and current.attempt == claim.attempt:
            tables.save_rollouts([leases.release(current)])


def renew(tables: Tables, attempt_ids: Sequence[str], *, lease_s: float = 60.0) -> list[str]:
    """See :meth:`agl.contracts.Store.renew`."""
    found = [need_held(tables, attempt_id) for attempt_id in attempt_ids]
    # An attempt that is decided has no lease; that its id is missing in the answer is how a worker
    # learns of it.
    held = [claim for claim in found if claim.attempt.status == "running"]
    renewed = [replace(claim.attempt, lease_until=tables.now + lease_s, lease_s=lease_s) for claim in held]
    tables.save([replace(claim, attempt=a) for claim, a in zip(held, renewed, strict=True)], is_logged=False)
    return [claim.attempt.attempt_id for claim in held]


def finish(tables: Tables, outcomes: Sequence[Outcome]) -> list[Rollout]:
    """See :meth:`agl.contracts.Store.finish`."""
    after: dict[str, Claim] = {}
    decided: dict[str, Claim] = {}
    for outcome in outcomes:
        values.check_spans(outcome.spans, attempt_id=outcome.attempt_id)
        # Two outcomes of one attempt may come in one call.
        current = after.get(outcome.attempt_id) or need_held(tables, outcome.attempt_id)
        settled = leases.settle(current, outcome, now=tables.now)
        if settled is not None:
            decided[outcome.attempt_id] = settled
        after[outcome.attempt_id] = settled or current
    # Before the attempts are saved as decided, or the outcome's own spans would be marked late.
    new = tables.insert_spans([span for outcome in outcomes for span in outcome.spans])
    blobs.refer(tables, new)
    own = _by_attempt(new)
    attempts = ((claim.rollout, counted(claim.attempt, own.pop(key, ()))) for key, claim in decided.items())
    _save_decided(tables, [Claim(rollout=rollout, attempt=attempt) for rollout, attempt in attempts])
    # Spans of outcomes that were repeated; those of decided attempts were counted with them.
    _count(tables, own, claims=after)
    return [after[outcome.attempt_id].rollout for outcome in outcomes]


def cancel(tables: Tables, rollout_ids: Sequence[str]) -> list[Rollout]:
    """See :meth:`agl.contracts.Store.cancel`."""
    found = {rollout_id: need_rollout(tables, rollout_id) for rollout_id in rollout_ids}
    for rollout in found.values():
        if rollout.is_finished:
            continue
        found[rollout.rollout_id] = after = replace(rollout, status="cancelled", finished_at=tables.now)
        if rollout.attempt_id is None:
            tables.save_rollouts([after])
            tables.add_statistics([share_of(after, None)])
        else:
            attempt = replace(need_held(tables, rollout.attempt_id).attempt, status="cancelled", finished_at=tables.now)
            _save_decided(tables, [Claim(rollout=after, attempt=attempt)])
    return [found[rollout_id] for rollout_id in rollout_ids]


def expire(tables: Tables) -> None:
    """Decide every overdue attempt as ``lost`` or ``timeout``; every transaction calls this first."""
    # Where a lost worker is noticed: tables.overdue() reads the index of deadlines, so that looking
    # costs nothing while all workers are alive.
    lapsed = (leases.end_overdue(claim, now=tables.now) for claim in tables.overdue())
    _save_decided(tables, [claim for claim in lapsed if claim is not None])


def _save_decided(tables: Tables, claims: Sequence[Claim]) -> None:
    """Save attempts that were just decided, and add the statistics of rollouts that finish with them."""
    tables.save(claims)
    tables.add_statistics([share_of(each.rollout, each.attempt) for each in claims if each.rollout.is_finished])


def _count(tables: Tables, spans: Mapping[str, Sequence[Span]], *, claims: Mapping[str, Claim]) -> None:
    """Count newly stored spans, given by attempt id, in tallies and in the statistics of finished rollouts."""
    for attempt_id, own in spans.items():
        if not attempt_id or all(span.call is None and span.reward is None for span in own):
            continue
        claim = claims[attempt_id]
        after = counted(claim.attempt, own)
        # Nothing that counts: most batches of spans have neither a call nor a reward.
        if after is claim.attempt:
            continue
        tables.save([replace(claim, attempt=after)], is_logged=False)
        if claim.rollout.is_finished and claim.rollout.attempt_id == attempt_id:
            # A late reward changes a finished rollout's share: the new one is added and the old one
            # taken out.
            tables.add_statistics([share_of(claim.rollout, after), share_of(claim.rollout, claim.attempt).negative])


def _by_attempt(spans: Iterable[Span]) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = {}
    for span in spans:
        found.setdefault(span.attempt_id, []).append(span)
    return found


def append_spans(tables: Tables, spans: Sequence[Span]) -> None:
    """See :meth:`agl.contracts.Store.append_spans`."""
    values.check_spans(spans)
    claims: dict[str, Claim] = {}
    for attempt_id, rollout_id in dict.fromkeys((span.attempt_id, span.rollout_id) for span in spans):
        if attempt_id:
            claims[attempt_id] = need_held(tables, attempt_id)
        else:
            _ = need_rollout(tables, rollout_id)
    new = tables.insert_spans(spans)
    blobs.refer(tables, new)
    _count(tables, _by_attempt(new), claims=claims)


def delete(tables: Tables, rollout_ids: Sequence[str]) -> int:
    """See :meth:`agl.contracts.Store.delete`."""
    found: dict[str, Rollout] = {}
    damaged: dict[str, Rollout] = {}
    for rollout_id in rollout_ids:
        try:
            found[rollout_id] = need_rollout(tables, rollout_id)
        except NotFoundError as error:
            if not error.is_damaged:
                raise
            if tables.is_running(rollout_id):
                raise ConflictError(
                    f"an attempt of rollout {rollout_id!r} is running, and the rollout's record cannot be read; "
                    "nothing was deleted: try again once the attempt's lease has ended"
                ) from error
            # Its share stays in the statistics, because only its record says to which step it belongs.
            damaged[rollout_id] = Rollout(rollout_id=rollout_id, task=None)
    unfinished = [rollout_id for rollout_id, rollout in found.items() if not rollout.is_finished]
    if unfinished:
        raise ConflictError(
            f"rollout {unfinished[0]!r} is {found[unfinished[0]].status} and {len(unfinished)} of {len(found)} are not "
            "finished; nothing was deleted: cancel them first, or wait until they finish"
        )
    shares = [share_of(rollout, _deciding(tables, rollout)) for rollout in found.values()]
    tables.remove([*found.values(), *damaged.values()])
    blobs.release(tables, [*found, *damaged])
    tables.add_statistics([share.negative for share in shares])
    return len(found) + len(damaged)


def _deciding(tables: Tables, rollout: Rollout) -> Attempt | None:
    return None if rollout.attempt_id is None else need_held(tables, rollout.attempt_id).attempt


def count_rollouts(reads: Reads, query: RolloutQuery) -> int:
    """See :meth:`agl.contracts.Store.count_rollouts`; used for tables that have no ``count_rollouts`` of their own."""
    count, query = 0, replace(query, after="", limit=1000)
    while page := reads.rollouts(query):
        count, query = count + len(page), query.next(page[-1])
    return count


def recordings(
    reads: Reads, query: RolloutQuery, *, spans: SpanChoice = "deciding", max_bytes: int = PAGE_BYTES
) -> list[Recording]:
    """See :meth:`agl.contracts.Store.recordings`."""
    found: list[Recording] = []
    most = spans.limit if isinstance(spans, SpanQuery) else SPAN_PAGE
    for rollout in reads.rollouts(query):
        attempts = reads.attempts(rollout.rollout_id)
        if isinstance(spans, SpanQuery):
            parts = [_chosen(reads, rollout.rollout_id, spans)]
        else:
            # "" stands for spans that belong to the rollout and to no attempt.
            ids = {"none": [], "deciding": [None], "all": ["", *(attempt.attempt_id for attempt in attempts)]}[spans]
            parts = [reads.spans(rollout.rollout_id, attempt_id=each, limit=most) for each in ids]
        is_whole = all(len(part) < most for part in parts)
        own = [span for part in parts for span in part]
        found.append(Recording(rollout=rollout, attempts=attempts, spans=own, is_whole=is_whole))
        # Measured after reading: a store cannot know the size of a page before.
        max_bytes -= sum(len(codec.encode(span)) for span in own)
        if max_bytes < 0:
            break
    return found


def _chosen(reads: Reads, rollout_id: str, query: SpanQuery) -> list[Span]:
    """Read one page of the spans that a query selects, in small parts; twice if the query names an agent."""
    around = Enclosing([queries.bare(span) for span in _scan(reads, rollout_id, query, 0)] if query.agent else [])
    spans = _scan(reads, rollout_id, query, query.after)
    return list(islice((span for span in spans if queries.is_chosen(span, query, around)), query.limit))


def _scan(reads: Reads, rollout_id: str, query: SpanQuery, after: int) -> Iterator[Span]:
    while page := reads.spans(rollout_id, attempt_id=query.attempt_id, after=after, limit=SCANNED):
        yield from page
        after = page[-1].sequence


def restore(tables: Tables, recordings: Sequence[Recording], *, moves: Sequence[LabelMove] = ()) -> list[str]:
    """Add recordings and label moves of another store without changing them; returns the ids of the new rollouts.

    A rollout that this store already has stays unchanged.

    Raises:
        ConflictError: A rollout is running, this store has the same id with another definition, or a recording has an
            attempt or a span of another rollout; nothing is added.
    """
    for recording in recordings:
        values.check_recording(recording)
    known = {recording.rollout.rollout_id: tables.rollout(recording.rollout.rollout_id) for recording in recordings}
    for recording in recordings:
        there, here = recording.rollout, known[recording.rollout.rollout_id]
        if here is not None and not values.is_same(values.definition(here), values.definition(there)):
            raise values.conflict("rollout", there.rollout_id)
        if there.status == "running":
            raise ConflictError(f"rollout {there.rollout_id!r} is running; copy it once it has finished")
    new = [recording for recording in recordings if known[recording.rollout.rollout_id] is None]
    tables.add([values.unbegun(recording.rollout) for recording in new])
    spans = [span for recording in new for span in recording.spans]
    tables.insert_spans([span for span in spans if not span.is_late])  # in time, because no attempt is decided yet
    blobs.refer(tables, spans)
    own = _by_attempt(spans)
    attempts = [(each.rollout, replace(attempt, tally=NO_TALLY)) for each in new for attempt in each.attempts]
    claims = [Claim(rollout=r, attempt=counted(a, own.get(a.attempt_id, ()))) for r, a in attempts]
    tables.save(claims, is_logged=False)
    # After their attempts are saved as decided, so that the tables mark them as late.
    tables.insert_spans([span for span in spans if span.is_late])
    tables.save_rollouts([recording.rollout for recording in new])
    finished = [recording.rollout for recording in new if recording.rollout.is_finished]
    tables.add_statistics([share_of(rollout, _deciding(tables, rollout)) for rollout in finished])
    tables.put(pair for move in moves for pair in documents_of(move).items())
    return [recording.rollout.rollout_id for recording in new]


def publish(tables: Tables, versions: Sequence[ResourceVersion]) -> None:
    """See :meth:`agl.contracts.Store.publish`."""
    new: dict[tuple[str, str], ResourceVersion] = {}
    for version in versions:
        values.check_secrets(version)
        key = (version.name, version.version)
        known = new.get(key) or tables.version(*key)
        if known is None:
            new[key] = version
        elif not values.is_same(known, version):
            raise values.conflict("resource version", f"{version.name}@{version.version}")
    for version in new.values():
        tables.add_version(version)


def resource(reads: Reads, name: str, version: str | None = None) -> ResourceVersion:
    """See :meth:`agl.contracts.Store.resource`."""
    found = reads.version(name, version)
    if found is None:
        raise unknown_resource(name, version)
    return found


def move_label(tables: Tables, move: LabelMove) -> LabelMove:
    """See :meth:`agl.contracts.Store.move_label`."""
    if tables.version(move.name, move.version) is None:
        raise unknown_resource(move.name, move.version)
    before = tables.get(document("labels", move.name, last=move.label))
    last = codec.decode(before, LabelMove) if before else None
    if last is not None and last.version == move.version:
        return last
    moved_at = max(tables.now, last.moved_at + 1e-6) if last is not None else tables.now  # clocks may go back
    move = replace(move, moved_at=moved_at)
    tables.put(documents_of(move).items())
    return move


def label_moves(reads: Reads, name: str, label: str) -> list[LabelMove]:
    """See :meth:`agl.contracts.Store.label_moves`."""
    return records(reads, LabelMove, "moves", name, label)


def labels(reads: Reads, name: str | None = None) -> list[LabelMove]:
    """See :meth:`agl.contracts.Store.labels`."""
    names = documents(reads, "labelled") if name is None else [name]
    return [move for each in names for move in records(reads, LabelMove, "labels", each)]


def save_scores(tables: Tables, scores: Sequence[VersionScore]) -> None:
    """See :meth:`agl.contracts.Store.save_scores`."""
    for score in scores:
        if tables.version(score.name, score.version) is None:
            raise unknown_resource(score.name, score.version)
    tables.put([pair for score in scores for pair in documents_of(score).items()])


def scores(reads: Reads, name: str) -> list[VersionScore]:
    """See :meth:`agl.contracts.Store.scores`."""
    return records(reads, VersionScore, "scores", name)


def save_state(
    tables: Tables,
    states: Mapping[str, bytes],
    *,
    experiment: ExperimentRecord | None = None,
    trained: Sequence[Trained] = (),
    leases: Sequence[Presence] = (),
) -> None:
    """See :meth:`agl.contracts.Store.save_state`."""
    for lease in leases:
        _require_session(tables, lease, lease.session)
    pairs = documents_of(states)
    for entry in trained:
        for key, step in documents_of(entry).items():
            # The ledger prevents that a rollout is trained on twice, even by a trainer that lost
            # its connection and continues.
            if tables.get(key) not in (None, step):
                raise ConflictError(
                    f"{key[-200:]!r} was trained on in step {tables.get(key)!r} already and not in step {entry.step}; "
                    "nothing was saved: a step trains on rollouts of its own"
                )
            pairs[key] = step
    if experiment is not None:
        pairs |= documents_of(experiment)
    tables.put([pair for pair in pairs.items() if pair[1]])
    tables.delete([key for key, value in pairs.items() if not value])


def load_state(reads: Reads, prefix: str) -> dict[str, bytes]:
    """See :meth:`agl.contracts.Store.load_state`."""
    return documents(reads, "state", last=prefix)


def experiments(reads: Reads, name: str | None = None) -> list[ExperimentRecord]:
    """See :meth:`agl.contracts.Store.experiments`."""
    return records(reads, ExperimentRecord, "experiment", last=name)


def trained(
    reads: Reads, experiment: str, *, run: int, algorithm: str, rollout_ids: Sequence[str] | None = None
) -> dict[str, int]:
    """See :meth:`agl.contracts.Store.trained`."""
    kind = ("trained", experiment, str(run), algorithm)
    if rollout_ids is None:
        return {rollout_id: int(step) for rollout_id, step in documents(reads, *kind).items()}
    found = ((rollout_id, reads.get(document(*kind, last=rollout_id))) for rollout_id in rollout_ids)
    return {rollout_id: int(step) for rollout_id, step in found if step is not None}


def announce(tables: Tables, presence: Presence, *, replaces: str | None = None) -> None:
    """See :meth:`agl.contracts.Store.announce`."""
    if replaces is not None:
        # Its own session: this very call may have been carried out before, and its answer lost.
        _require_session(tables, presence, replaces, presence.session)
    tables.put(documents_of(replace(presence, seen_at=tables.now)).items())


def _require_session(tables: Tables, presence: Presence, *sessions: str) -> None:
    (key,) = documents_of(presence)
    found = tables.get(key)
    if (codec.decode(found, Presence).session if found else "") not in sessions:
        raise FencedError(f"another process holds the lease of experiment {presence.experiment!r}; nothing was saved")


def withdraw(tables: Tables, experiment: str, members: Sequence[str]) -> None:
    """See :meth:`agl.contracts.Store.withdraw`."""
    tables.delete([document("presence", experiment, last=member) for member in members])


def presences(reads: Reads, experiment: str, *, member: str | None = None) -> list[Presence]:
    """See :meth:`agl.contracts.Store.presences`."""
    return records(reads, Presence, "presence", experiment, last=member)


def log_metrics(tables: Tables, metrics: Sequence[Metric]) -> None:
    """See :meth:`agl.contracts.Store.log_metrics`."""
    tables.log_metrics(metrics)


def documents_of(
    kept: LabelMove | VersionScore | ExperimentRecord | Trained | Presence | Mapping[str, bytes],
) -> dict[bytes, bytes]:
    """Encode a record, or states by key, as documents by key; a label's move is stored as newest and as history."""
    match kept:
        case LabelMove(name=name, label=label):
            history = document("moves", name, label, last=f"{kept.moved_at:024.9f}")  # as fine as a float
            # Two keys for one move: the newest by label, which is read often, and the history.
            keys = [document("labels", name, last=label), history]
            return {**dict.fromkeys(keys, codec.encode(kept)), document("labelled", last=name): b""}
        case VersionScore(name=name, version=version):
            return {document("scores", name, last=version): codec.encode(kept)}
        case ExperimentRecord(name=name):
            return {document("experiment", last=name): codec.encode(kept)}
        case Presence(experiment=experiment, member=member):
            return {document("presence", experiment, last=member): codec.encode(kept)}
        case Trained(experiment=experiment, run=run, algorithm=algorithm):
            keys = [document("trained", experiment, str(run), algorithm, last=each) for each in kept.rollout_ids]
            return dict.fromkeys(keys, b"%d" % kept.step)
        case _:
            return {document("state", last=key): bytes(value) for key, value in kept.items()}


def documents(reads: Reads, *kind: str, last: str = "") -> dict[str, bytes]:
    """Return the documents of a kind, sorted by the last part of their keys, which must start with ``last``.

    The result is keyed by that last part.
    """
    start, whole = len(document(*kind)), document(*kind, last=last)
    return {key[start:].decode(): value for key, value in reads.scan(whole, whole + b"\xff")}  # no text has that byte


def records(reads: Reads, type: type[R], *kind: str, last: str | None = None) -> list[R]:
    """All documents of a kind, decoded to records; with ``last``, only the document with that last key part."""
    data = documents(reads, *kind).values() if last is None else [reads.get(document(*kind, last=last))]
    return values.readable(data, type)
