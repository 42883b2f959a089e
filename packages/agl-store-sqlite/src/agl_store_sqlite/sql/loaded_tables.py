"""The tables of one transaction, in memory, over the rows that were read at its start.

Operations of the transaction see each other's changes; nothing is written before the store writes
:attr:`LoadedTables.changes`.
"""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from agl.contracts import Metric, Statistics
from agl.schemas import Attempt, Claim, ResourceVersion, Rollout, Span, attempt_id_of, encode
from agl.stores import deadline
from agl_store_sqlite.sql.changes import Changes, LoadedRows
from agl_store_sqlite.sql.packing import AttemptSpans, Packer, place_spans
from agl_store_sqlite.sql.rows import ATTEMPT_BITS, number_of


class LoadedTables:
    """Implements :class:`agl.stores.Tables`.

    Attributes:
        now: The server's clock at the start of the transaction, in Unix seconds.
        changes: Changes to write at the commit.
    """

    def __init__(self, loaded: LoadedRows, packer: Packer, *, lapsed: Sequence[str] = ()) -> None:
        self._loaded = loaded
        self._packer = packer
        self._lapsed = lapsed
        self.now = loaded.now
        self.changes = Changes()

    def rollout(self, rollout_id: str) -> Rollout | None:
        if rollout_id in self._loaded.damaged:
            raise self._loaded.damaged[rollout_id]
        return self._loaded.rollouts.get(rollout_id)

    def held(self, attempt_id: str) -> Claim | None:
        attempt = self._loaded.attempts.get(attempt_id)
        rollout = attempt and self.rollout(attempt.rollout_id)
        return Claim(rollout=rollout, attempt=attempt) if rollout and attempt else None

    def queued(self, experiment: str | None, limit: int) -> list[Rollout]:
        """Return the oldest rollouts that this transaction holds for its claims and that no claim has taken."""
        return self._still_queued(self._loaded.queues.get(experiment, ()))[:limit]

    def _still_queued(self, rollout_ids: Iterable[str]) -> list[Rollout]:
        found = (self._loaded.rollouts.get(rollout_id) for rollout_id in rollout_ids)
        return [rollout for rollout in found if rollout is not None and rollout.status == "queued"]

    def claimed(self, claim_id: str) -> list[Claim]:
        attempts = [
            attempt
            for attempt in self._loaded.attempts.values()
            if attempt.claim_id == claim_id and attempt.status == "running"
        ]
        attempts.sort(key=lambda attempt: self._key(attempt.rollout_id, attempt.number))
        return self._claims(attempts)

    def overdue(self) -> list[Claim]:
        """Return the attempts that were found overdue when the transaction began."""
        lapsed = [self._loaded.attempts[attempt_id] for attempt_id in self._lapsed]
        for attempt in lapsed:
            if attempt.rollout_id in self._loaded.damaged:  # else its deadline would end every transaction
                key, data = self._key(attempt.rollout_id, attempt.number), encode(replace(attempt, status="lost"))
                self.changes.attempts[key] = ("lost", attempt.claim_id, attempt.lease_until, data)
        return [claim for claim in self._claims(lapsed) if deadline(claim) <= self.now]

    def is_running(self, rollout_id: str) -> bool:
        attempts = self._loaded.attempts.values()
        return any(each.rollout_id == rollout_id and each.status == "running" for each in attempts)

    def _claims(self, attempts: Iterable[Attempt]) -> list[Claim]:
        """Return the attempts of readable rollouts as claims."""
        rollouts = self._loaded.rollouts
        return [Claim(rollout=rollouts[a.rollout_id], attempt=a) for a in attempts if a.rollout_id in rollouts]

    def add(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            seq = self._loaded.numbers.pop(0)
            self._loaded.rollouts[rollout.rollout_id] = rollout
            self._loaded.seqs[rollout.rollout_id] = seq
            self.changes.added.append((seq, rollout))
        self._log(rollouts)

    def save(self, claims: Sequence[Claim], *, is_logged: bool = True) -> None:
        for claim in claims:
            attempt, key = claim.attempt, self._key(claim.rollout.rollout_id, claim.attempt.number)
            before = self._loaded.attempts.get(attempt.attempt_id)
            if attempt.status != "running":
                self._packer.forget(key)
            elif before is None or attempt.lease_until < before.lease_until:
                self.changes.soonest = min(self.changes.soonest, deadline(claim))
            self._loaded.attempts[attempt.attempt_id] = attempt
            self.changes.attempts[key] = (attempt.status, attempt.claim_id, deadline(claim), encode(attempt))
        if is_logged:
            self._save([claim.rollout for claim in claims])

    def save_rollouts(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            number = rollout.attempts + 1
            if self._loaded.attempts.pop(attempt_id_of(rollout.rollout_id, number), None) is not None:
                self.changes.attempts[self._key(rollout.rollout_id, number)] = None
                self._packer.forget(self._key(rollout.rollout_id, number))
        self._save(rollouts)

    def _save(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            self._loaded.rollouts[rollout.rollout_id] = rollout
            self.changes.rollouts[self._loaded.seqs[rollout.rollout_id]] = rollout
        self._log(rollouts)

    def insert_spans(self, spans: Sequence[Span]) -> list[Span]:
        rows, new = place_spans(spans, self._packer, self._attempt_spans)
        self._loaded.kept |= {(key, span_id) for key, _, span_id, _ in rows}
        self._loaded.last |= {key: sequence for key, sequence, _, _ in rows}
        self.changes.spans += rows
        touched = {key for key, _, _, _ in rows}
        for rollout_id, attempt_id in dict.fromkeys((span.rollout_id, span.attempt_id) for span in spans):
            key = self._span_key(rollout_id, attempt_id)
            if key in touched:
                self.changes.feed.append((key, "spans", self._loaded.rollouts[rollout_id].status, None))
        return new

    def add_statistics(self, shares: Sequence[Statistics]) -> None:
        self.changes.shares += shares

    def _attempt_spans(self, span: Span) -> AttemptSpans:
        key, attempt = self._span_key(span.rollout_id, span.attempt_id), self._loaded.attempts.get(span.attempt_id)
        return AttemptSpans(
            key=key,
            last=self._loaded.last.get(key, 0),
            is_late=attempt is not None and attempt.status != "running",
            has=lambda span_id: (key, span_id) in self._loaded.kept,
        )

    def _span_key(self, rollout_id: str, attempt_id: str) -> int:
        return self._key(rollout_id, number_of(attempt_id) if attempt_id else 0)

    def remove(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            self._loaded.rollouts.pop(rollout.rollout_id, None)
            self._loaded.damaged.pop(rollout.rollout_id, None)
            self.changes.removed.append(self._loaded.seqs[rollout.rollout_id])

    def version(self, name: str, version: str) -> ResourceVersion | None:
        return self._loaded.versions.get((name, version))

    def add_version(self, version: ResourceVersion) -> None:
        self._loaded.versions[version.name, version.version] = version
        self.changes.versions.append((version.name, version.version, encode(version)))
        self.changes.feed.append((None, "resource", version.version, version.name))

    def get(self, key: bytes) -> bytes | None:
        return self.changes.documents.get(key, self._loaded.documents.get(key))

    def put(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        self.changes.documents |= pairs

    def delete(self, keys: Iterable[bytes]) -> None:
        self.changes.documents |= dict.fromkeys(keys)

    def log_metrics(self, metrics: Sequence[Metric]) -> None:
        """Add metrics to the changes; a metric replaces an earlier one with the same key."""
        for metric in metrics:
            key = (metric.experiment, metric.run, metric.algorithm, metric.step, metric.name)
            self.changes.metrics[key] = (metric.experiment_step, metric.value, metric.time)

    @property
    def has_spare(self) -> bool:
        """Return true if no claim took some of the queued rollouts held here, so that other machines must look."""
        return any(self._still_queued(rollout_ids) for rollout_ids in self._loaded.queues.values())

    def _key(self, rollout_id: str, number: int) -> int:
        return self._loaded.seqs[rollout_id] << ATTEMPT_BITS | number

    def _log(self, rollouts: Sequence[Rollout]) -> None:
        """Append the current status of the rollouts to the change feed."""
        for rollout in rollouts:
            key = self._key(rollout.rollout_id, rollout.attempts if rollout.attempt_id else 0)
            self.changes.feed.append((key, "rollout", rollout.status, None))
            self.changes.has_queued |= rollout.status == "queued"
