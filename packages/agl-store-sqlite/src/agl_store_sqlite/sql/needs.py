"""Derives the rows that an operation needs, so that a transaction can load them in one round trip."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agl.contracts import LabelMove, Presence, Recording, Trained, VersionScore
from agl.schemas import Blob, Claim, Outcome, ResourceVersion, Rollout, Span
from agl.stores import Work, documents_needed, documents_of

MOST_CLAIMED = 100_000
"""Largest number of rollouts that one transaction claims."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The rows that an operation needs.

    Attributes:
        rollout_ids: Rollouts to load with their running or deciding attempts.
        attempt_ids: Attempts to load with their rollouts.
        spans: Spans to append.
        new: Largest number of rollouts to add.
        queue: The experiment, or ``None`` for all, and the number of its oldest queued rollouts to load.
        claim_ids: Claims whose running attempts to load.
        versions: Resource versions to load, by name and version.
        documents: Keys of documents to load.
        locks: Names of locks to take, so that no other transaction changes these documents.
    """

    rollout_ids: Sequence[str] = ()
    attempt_ids: Sequence[str] = ()
    spans: Sequence[Span] = ()
    new: int = 0
    queue: tuple[str | None, int] | None = None
    claim_ids: Sequence[str] = ()
    versions: Sequence[tuple[str, str]] = ()
    documents: Sequence[bytes] = ()
    locks: Sequence[str] = ()


def needs_of(work: Work[Any]) -> Needs:
    """Return the rows that an operation needs; empty for operations that only write."""
    find = _NEEDS.get(work.act.__name__)
    return Needs() if find is None else find(*work.args, **work.kwargs)


def queues_of(needs: Sequence[Needs]) -> dict[str | None, int]:
    """Return the number of queued rollouts that the operations need, by experiment."""
    queues: dict[str | None, int] = {}
    for need in needs:
        if need.queue is not None and need.queue[1]:
            experiment, limit = need.queue
            queues[experiment] = min(MOST_CLAIMED, queues.get(experiment, 0) + limit)
    return queues


def _enqueue(rollouts: Sequence[Rollout]) -> Needs:
    return Needs(rollout_ids=[rollout.rollout_id for rollout in rollouts], new=len(rollouts))


def _restore(recordings: Sequence[Recording], **_: Any) -> Needs:
    return Needs(
        rollout_ids=[recording.rollout.rollout_id for recording in recordings],
        new=len(recordings),
        documents=documents_needed(spans=[span for recording in recordings for span in recording.spans]),
    )


def _claim(*, limit: int, experiment: str | None, claim_id: str, **_: Any) -> Needs:
    return Needs(queue=(experiment, limit), claim_ids=(claim_id,) if claim_id else ())


def _unclaim(claims: Sequence[Claim]) -> Needs:
    return Needs(attempt_ids=[claim.attempt.attempt_id for claim in claims])


def _renew(attempt_ids: Sequence[str], **_: Any) -> Needs:
    return Needs(attempt_ids=attempt_ids)


def _finish(outcomes: Sequence[Outcome]) -> Needs:
    spans = [span for outcome in outcomes for span in outcome.spans]
    attempt_ids = [outcome.attempt_id for outcome in outcomes]
    return Needs(attempt_ids=attempt_ids, spans=spans, documents=documents_needed(spans=spans))


def _of_rollouts(rollout_ids: Sequence[str]) -> Needs:
    return Needs(rollout_ids=rollout_ids)


def _delete(rollout_ids: Sequence[str]) -> Needs:
    return Needs(rollout_ids=rollout_ids, documents=documents_needed(rollout_ids=rollout_ids))


def _append_spans(spans: Sequence[Span]) -> Needs:
    return Needs(spans=spans, documents=documents_needed(spans=spans))


def _save_blobs(blobs: Sequence[Blob]) -> Needs:
    return _of_blobs([blob.digest for blob in blobs])


def _drop(checks: Sequence[Any]) -> Needs:
    return _of_blobs([check.digest for check in checks])


def _of_blobs(digests: Sequence[str]) -> Needs:
    return Needs(documents=documents_needed(digests=digests), locks=[f"blob {digest}" for digest in digests])


def _publish(versions: Sequence[ResourceVersion]) -> Needs:
    return Needs(versions=[(version.name, version.version) for version in versions])


def _move_label(move: LabelMove) -> Needs:
    locks = [f"label {move.name} {move.label}"]
    return Needs(versions=[(move.name, move.version)], documents=list(documents_of(move)), locks=locks)


def _save_scores(scores: Sequence[VersionScore]) -> Needs:
    return Needs(versions=[(score.name, score.version) for score in scores])


def _save_state(
    states: Mapping[str, bytes],
    *,
    trained: Sequence[Trained] = (),
    leases: Sequence[Presence] = (),
    **_: Any,
) -> Needs:
    keys = [key for entry in (*trained, *leases) for key in documents_of(entry)]
    ledgers = [f"ledger {entry.experiment} {entry.run} {entry.algorithm}" for entry in trained]
    return Needs(documents=keys, locks=[*ledgers, *map(_lease, leases)])


def _announce(presence: Presence, *, replaces: str | None = None) -> Needs:
    return Needs() if replaces is None else Needs(documents=list(documents_of(presence)), locks=[_lease(presence)])


def _lease(presence: Presence) -> str:
    return f"lease {presence.experiment} {presence.member}"


_NEEDS: dict[str, Callable[..., Needs]] = {
    "enqueue": _enqueue,
    "restore": _restore,
    "claim": _claim,
    "unclaim": _unclaim,
    "renew": _renew,
    "finish": _finish,
    "cancel": _of_rollouts,
    "delete": _delete,
    "append_spans": _append_spans,
    "save_blobs": _save_blobs,
    "drop": _drop,
    "publish": _publish,
    "move_label": _move_label,
    "save_scores": _save_scores,
    "save_state": _save_state,
    "announce": _announce,
}
