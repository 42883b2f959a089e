"""The store's operations as work for the writer: what each needs, and what it does with the tables."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from agl.contracts import Metric
from agl.errors import StoreError
from agl.schemas import Claim, Outcome, ResourceVersion, Rollout, Span
from agl.stores import engine
from agl_store_postgres._tables import PostgresTables
from agl_store_postgres.loading import Needs


@dataclass(frozen=True, kw_only=True)
class Work:
    """One operation.

    Attributes:
        repeat_needs: What it needs when it is done again after nobody knows whether it was committed.
        is_alone: It shares its transaction with no other.
    """

    needs: Needs
    act: Callable[[PostgresTables], Any]
    repeat_needs: Needs | None = None
    is_alone: bool = False


def nothing() -> Work:
    """No operation: overdue attempts are decided before any."""
    return Work(needs=Needs(), act=lambda tables: None, is_alone=True)


def enqueue(rollouts: Sequence[Rollout]) -> Work:
    """See :meth:`agl.contracts.Store.enqueue`."""
    needs = Needs(rollout_ids=[rollout.rollout_id for rollout in rollouts], new=len(rollouts))
    return Work(needs=needs, act=lambda tables: engine.enqueue(tables, rollouts, now=tables.now))


def claim(
    *, worker: str, limit: int, lease_s: float, experiment: str | None, claim_id: str, is_new_claim: bool
) -> Work:
    """See :meth:`agl.contracts.Store.claim`, without the waiting.

    Args:
        is_new_claim: The id was made just now, so that nothing runs under it unless this work was committed before.
    """

    def act(tables: PostgresTables) -> list[Claim]:
        return engine.claim(
            tables,
            worker=worker,
            limit=limit,
            lease_s=lease_s,
            experiment=experiment,
            claim_id=claim_id,
            now=tables.now,
        )

    first = Needs(queue=(experiment, limit))
    again = Needs(queue=(experiment, limit), claim_ids=(claim_id,))
    return Work(needs=first if is_new_claim else again, act=act, repeat_needs=again)


def unclaim(claims: Sequence[Claim]) -> Work:
    """Take back attempts whose claimer went away before it saw them."""
    needs = Needs(attempt_ids=[claim.attempt.attempt_id for claim in claims])
    return Work(needs=needs, act=lambda tables: engine.unclaim(tables, claims))


def renew(attempt_ids: Sequence[str], *, lease_s: float) -> Work:
    """See :meth:`agl.contracts.Store.renew`."""
    needs = Needs(attempt_ids=attempt_ids)
    return Work(needs=needs, act=lambda tables: engine.renew(tables, attempt_ids, lease_s=lease_s, now=tables.now))


def finish(outcomes: Sequence[Outcome]) -> Work:
    """See :meth:`agl.contracts.Store.finish`."""
    needs = Needs(
        attempt_ids=[outcome.attempt_id for outcome in outcomes],
        spans=[span for outcome in outcomes for span in outcome.spans],
    )
    return Work(needs=needs, act=lambda tables: engine.finish(tables, outcomes, now=tables.now))


def cancel(rollout_ids: Sequence[str]) -> Work:
    """See :meth:`agl.contracts.Store.cancel`."""
    needs = Needs(rollout_ids=rollout_ids)
    return Work(needs=needs, act=lambda tables: engine.cancel(tables, rollout_ids, now=tables.now))


def append_spans(spans: Sequence[Span]) -> Work:
    """See :meth:`agl.contracts.Store.append_spans`."""
    return Work(needs=Needs(spans=spans), act=lambda tables: engine.append_spans(tables, spans))


def publish(versions: Sequence[ResourceVersion]) -> Work:
    """See :meth:`agl.contracts.Store.publish`."""
    needs = Needs(versions=[(version.name, version.version) for version in versions])
    return Work(needs=needs, act=lambda tables: engine.publish(tables, versions))


def save_state(states: Mapping[str, bytes]) -> Work:
    """See :meth:`agl.contracts.Store.save_state`."""
    return Work(needs=Needs(), act=lambda tables: tables.save_state(states))


def log_metrics(metrics: Sequence[Metric]) -> Work:
    """See :meth:`agl.contracts.Store.log_metrics`."""
    return Work(needs=Needs(), act=lambda tables: tables.log_metrics(metrics))


def delete(rollout_ids: Sequence[str]) -> Work:
    """See :meth:`agl.contracts.Store.delete`."""
    return Work(needs=Needs(rollout_ids=rollout_ids), act=partial(_delete, rollout_ids=rollout_ids), is_alone=True)


def _delete(tables: PostgresTables, rollout_ids: Sequence[str]) -> int:
    if tables.is_repeat and any(tables.rollout(rollout_id) is None for rollout_id in rollout_ids):
        raise StoreError(
            f"the server went away while {len(rollout_ids)} rollouts were deleted, and some of them are gone; "
            "list what is left and delete that"
        )
    return engine.delete(tables, rollout_ids)
