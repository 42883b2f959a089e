"""The store's operations on rollouts, attempts and spans, written once over the tables that a store provides.

Every operation checks everything before it changes anything, so that one that raises leaves no trace.
Whoever calls holds the store's lock or transaction; nothing here waits.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from msgspec.structs import replace

from agl.errors import ConflictError, NotFoundError, StoreError
from agl.schemas import Attempt, Claim, Outcome, ResourceVersion, Rollout, Span
from agl.schemas._ids import rollout_id_of
from agl.stores import rules


class Tables(Protocol):
    """What a store keeps, as its current transaction sees it; each change of a rollout is put on the change feed."""

    def rollout(self, rollout_id: str) -> Rollout | None:
        """One rollout."""
        ...

    def held(self, attempt_id: str) -> Claim | None:
        """An attempt, decided or not, with its rollout."""
        ...

    def queued(self, experiment: str | None, limit: int) -> list[Rollout]:
        """The oldest queued rollouts, in order of their first enqueueing."""
        ...

    def claimed(self, claim_id: str) -> list[Claim]:
        """Attempts that still run under a claim id."""
        ...

    def overdue(self, now: float) -> list[Claim]:
        """Running attempts whose deadline has come."""
        ...

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Put new rollouts at the end of the queue."""
        ...

    def open(self, claims: Sequence[Claim]) -> None:
        """Add new attempts and save their rollouts."""
        ...

    def save(self, claims: Sequence[Claim]) -> None:
        """Save known attempts and their rollouts."""
        ...

    def save_rollouts(self, rollouts: Sequence[Rollout]) -> None:
        """Save rollouts."""
        ...

    def renew(self, claims: Sequence[Claim]) -> None:
        """Save attempts whose lease was extended; no entry on the change feed."""
        ...

    def drop(self, attempt: Attempt, rollout: Rollout) -> None:
        """Remove an attempt that nobody got to see, and save its rollout."""
        ...

    def insert_spans(self, spans: Sequence[Span]) -> None:
        """Append spans of known attempts, but those the attempt already has."""
        ...

    def remove(self, rollouts: Sequence[Rollout]) -> None:
        """Remove rollouts with everything that belongs to them."""
        ...

    def version(self, name: str, version: str) -> ResourceVersion | None:
        """One version of a resource."""
        ...

    def add_version(self, version: ResourceVersion) -> None:
        """Add a resource version as the newest of its name."""
        ...


def closed(url: str) -> StoreError:
    """The error for a store that was closed."""
    return StoreError(f"the store {url} was closed; open it again, or close it only when nobody waits for it")


def unknown_resource(name: str, version: str | None) -> NotFoundError:
    """The error for a resource that nobody published."""
    key = name if version is None else f"{name}@{version}"
    return NotFoundError("resource", key, "publish it first, or name it in the experiment's resources")


def unknown_attempt(rollout_id: str, attempt_id: str) -> NotFoundError:
    """The error for an attempt that the rollout has not."""
    return NotFoundError("attempt", attempt_id, f"rollout {rollout_id!r} has no such attempt")


def need_rollout(tables: Tables, rollout_id: str) -> Rollout:
    """The rollout, or :class:`NotFoundError`."""
    found = tables.rollout(rollout_id)
    if found is None:
        raise NotFoundError("rollout", rollout_id)
    return found


def need_held(tables: Tables, attempt_id: str) -> Claim:
    """The attempt with its rollout, or :class:`NotFoundError`."""
    found = tables.held(attempt_id)
    if found is None:
        raise NotFoundError("attempt", attempt_id)
    return found


def enqueue(tables: Tables, rollouts: Sequence[Rollout], *, now: float) -> list[Rollout]:
    """See :meth:`agl.contracts.Store.enqueue`."""
    new: dict[str, Rollout] = {}
    stored: list[Rollout] = []
    for rollout in rollouts:
        known = new.get(rollout.rollout_id) or tables.rollout(rollout.rollout_id)
        if known is None:
            known = new[rollout.rollout_id] = rules.new_rollout(rollout, now=now)
        elif not rules.is_same_definition(known, rules.copied(rollout)):
            raise rules.conflict("rollout", rollout.rollout_id)
        stored.append(known)
    tables.add(list(new.values()))
    return stored


def claim(
    tables: Tables, *, worker: str, limit: int, lease_s: float, experiment: str | None, claim_id: str, now: float
) -> list[Claim]:
    """See :meth:`agl.contracts.Store.claim`, without the waiting."""
    if claim_id and (running := tables.claimed(claim_id)):
        return running
    claims = [
        rules.open_attempt(rollout, worker=worker, claim_id=claim_id, lease_s=lease_s, now=now)
        for rollout in tables.queued(experiment, limit)
    ]
    tables.open(claims)
    return claims


def unclaim(tables: Tables, claims: Iterable[Claim]) -> None:
    """Take back attempts whose claimer went away before it saw them."""
    for claim in claims:
        current = tables.held(claim.attempt.attempt_id)
        if current is not None and current.attempt == claim.attempt:
            tables.drop(current.attempt, rules.release(current))


def renew(tables: Tables, attempt_ids: Sequence[str], *, lease_s: float, now: float) -> list[str]:
    """See :meth:`agl.contracts.Store.renew`."""
    found = [need_held(tables, attempt_id) for attempt_id in attempt_ids]
    held = [claim for claim in found if claim.attempt.status == "running"]
    tables.renew([replace(claim, attempt=replace(claim.attempt, lease_until=now + lease_s)) for claim in held])
    return [claim.attempt.attempt_id for claim in held]


def finish(tables: Tables, outcomes: Sequence[Outcome], *, now: float) -> list[Rollout]:
    """See :meth:`agl.contracts.Store.finish`."""
    after: dict[str, Claim] = {}
    decided: dict[str, Claim] = {}
    for outcome in outcomes:
        rules.check_spans(outcome.spans, attempt_id=outcome.attempt_id)
        current = after.get(outcome.attempt_id) or need_held(tables, outcome.attempt_id)
        settled = rules.settle(current, outcome, now=now)
        if settled is not None:
            decided[outcome.attempt_id] = settled
        after[outcome.attempt_id] = settled or current
    tables.insert_spans([span for outcome in outcomes for span in outcome.spans])
    tables.save(list(decided.values()))
    return [after[outcome.attempt_id].rollout for outcome in outcomes]


def cancel(tables: Tables, rollout_ids: Sequence[str], *, now: float) -> list[Rollout]:
    """See :meth:`agl.contracts.Store.cancel`."""
    found = {rollout_id: need_rollout(tables, rollout_id) for rollout_id in rollout_ids}
    for rollout in found.values():
        if rollout.is_finished:
            continue
        found[rollout.rollout_id] = after = rules.cancel_rollout(rollout, now=now)
        if rollout.attempt_id is None:
            tables.save_rollouts([after])
        else:
            attempt = need_held(tables, rollout.attempt_id).attempt
            tables.save([Claim(rollout=after, attempt=replace(attempt, status="cancelled", finished_at=now))])
    return [found[rollout_id] for rollout_id in rollout_ids]


def expire(tables: Tables, *, now: float) -> None:
    """Decide every attempt that is overdue."""
    lapsed = (rules.lapse(claim, now=now) for claim in tables.overdue(now))
    tables.save([claim for claim in lapsed if claim is not None])


def append_spans(tables: Tables, spans: Sequence[Span]) -> None:
    """See :meth:`agl.contracts.Store.append_spans`."""
    rules.check_spans(spans)
    for attempt_id, rollout_id in dict.fromkeys((span.attempt_id, span.rollout_id) for span in spans):
        if attempt_id:
            need_held(tables, attempt_id)
        else:
            need_rollout(tables, rollout_id)
    tables.insert_spans(spans)


def publish(tables: Tables, versions: Sequence[ResourceVersion]) -> None:
    """See :meth:`agl.contracts.Store.publish`."""
    new: dict[tuple[str, str], ResourceVersion] = {}
    for version in versions:
        rules.check_secrets(version)
        version = rules.copied(version)
        key = (version.name, version.version)
        known = new.get(key) or tables.version(*key)
        if known is None:
            new[key] = version
        elif known != version:
            raise rules.conflict("resource version", f"{version.name}@{version.version}")
    for version in new.values():
        tables.add_version(version)


def delete(tables: Tables, rollout_ids: Sequence[str]) -> int:
    """See :meth:`agl.contracts.Store.delete`."""
    found = {rollout_id: need_rollout(tables, rollout_id) for rollout_id in rollout_ids}
    unfinished = [rollout_id for rollout_id, rollout in found.items() if not rollout.is_finished]
    if unfinished:
        raise ConflictError(
            f"rollout {unfinished[0]!r} is {found[unfinished[0]].status} and {len(unfinished)} of {len(found)} are not "
            "finished; nothing was deleted: cancel them first, or wait until they finish"
        )
    tables.remove(list(found.values()))
    return len(found)


def default_attempt(tables: Tables, rollout_id: str, attempt_id: str | None) -> str:
    """The attempt whose spans are meant: the named one, else the deciding or running one, else none."""
    rollout = need_rollout(tables, rollout_id)
    if not attempt_id:
        return "" if attempt_id == "" else rollout.attempt_id or ""
    if rollout_id_of(attempt_id) != rollout_id or tables.held(attempt_id) is None:
        raise unknown_attempt(rollout_id, attempt_id)
    return attempt_id
