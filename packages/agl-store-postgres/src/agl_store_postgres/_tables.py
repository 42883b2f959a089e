"""The tables as a transaction sees and changes them: in memory, over what was locked and read at its start.

Nothing is written before :meth:`PostgresTables.changes` is flushed, so an operation that raises leaves no trace, and
the operations of one transaction see each other's changes.
"""

from collections.abc import Mapping, Sequence

from agl.contracts import Metric
from agl.errors import StoreError
from agl.schemas import Attempt, Claim, ResourceVersion, Rollout, Span, encode
from agl.stores import ATTEMPT_BITS, MAX_SEQUENCE, Packer, mark_late, number_of, rules
from agl_store_postgres.loading import Loaded
from agl_store_postgres.writing import Changes, SpanRow


class PostgresTables:
    """See :class:`agl.stores.engine.Tables`.

    Attributes:
        now: The server's clock at the start of the transaction, in Unix seconds.
        changes: What is to be written.
        is_repeat: The transaction was tried before, and nobody knows whether that was committed.
    """

    def __init__(self, loaded: Loaded, packer: Packer, *, lapsed: Sequence[str] = (), is_repeat: bool = False) -> None:
        self._loaded = loaded
        self._packer = packer
        self._lapsed = lapsed
        self.now = loaded.now
        self.is_repeat = is_repeat
        self.changes = Changes()

    def rollout(self, rollout_id: str) -> Rollout | None:
        return self._loaded.rollouts.get(rollout_id)

    def held(self, attempt_id: str) -> Claim | None:
        attempt = self._loaded.attempts.get(attempt_id)
        rollout = attempt and self._loaded.rollouts.get(attempt.rollout_id)
        return Claim(rollout=rollout, attempt=attempt) if rollout and attempt else None

    def queued(self, experiment: str | None, limit: int) -> list[Rollout]:
        """The oldest of those that were locked for this transaction's claims and that none of them took."""
        rollouts = [self._loaded.rollouts[rollout_id] for rollout_id in self._loaded.queues.get(experiment, ())]
        return [rollout for rollout in rollouts if rollout.status == "queued"][:limit]

    def claimed(self, claim_id: str) -> list[Claim]:
        attempts = [
            attempt
            for attempt in self._loaded.attempts.values()
            if attempt.claim_id == claim_id and attempt.status == "running"
        ]
        attempts.sort(key=lambda attempt: self._key(attempt.rollout_id, attempt.number))
        return [Claim(rollout=self._loaded.rollouts[attempt.rollout_id], attempt=attempt) for attempt in attempts]

    def overdue(self, now: float) -> list[Claim]:
        """The attempts that were found overdue and locked when the transaction began."""
        claims = (self.held(attempt_id) for attempt_id in self._lapsed)
        return [claim for claim in claims if claim is not None and rules.deadline(claim) <= now]

    def add(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            seq = self._loaded.numbers.pop(0)
            self._loaded.rollouts[rollout.rollout_id] = rollout
            self._loaded.seqs[rollout.rollout_id] = seq
            self.changes.added.append((seq, rollout))
        self._log(rollouts)

    def open(self, claims: Sequence[Claim]) -> None:
        self._put(claims)
        self.save_rollouts([claim.rollout for claim in claims])
        for claim in claims:
            self.changes.soonest = min(self.changes.soonest, rules.deadline(claim))

    def save(self, claims: Sequence[Claim]) -> None:
        self._put(claims)
        self.save_rollouts([claim.rollout for claim in claims])
        for claim in claims:
            self._packer.forget(self._key(claim.rollout.rollout_id, claim.attempt.number))

    def save_rollouts(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            self._loaded.rollouts[rollout.rollout_id] = rollout
            self.changes.rollouts[self._loaded.seqs[rollout.rollout_id]] = rollout
        self._log(rollouts)

    def renew(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            before = self._loaded.attempts[claim.attempt.attempt_id]
            if claim.attempt.lease_until < before.lease_until:
                self.changes.soonest = min(self.changes.soonest, rules.deadline(claim))
        self._put(claims)

    def drop(self, attempt: Attempt, rollout: Rollout) -> None:
        key = self._key(attempt.rollout_id, attempt.number)
        del self._loaded.attempts[attempt.attempt_id]
        self.changes.attempts[key] = None
        self._packer.forget(key)
        self.save_rollouts([rollout])

    def insert_spans(self, spans: Sequence[Span]) -> None:
        """Packs all spans before it keeps the first, so that one that cannot be packed leaves no trace."""
        rows: dict[tuple[int, str], SpanRow] = {}
        last: dict[int, int] = {}
        touched: dict[int, str] = {}
        try:
            for span in spans:
                key = self._key(span.rollout_id, number_of(span.attempt_id) if span.attempt_id else 0)
                if (key, span.span_id) in self._loaded.kept or (key, span.span_id) in rows:
                    continue
                sequence = max(span.sequence, last.get(key, self._loaded.last.get(key, 0)) + 1)
                rows[key, span.span_id] = self._span_row(span, key, sequence)
                last[key] = sequence
                touched[key] = self._loaded.rollouts[span.rollout_id].status
        except StoreError:
            self._packer.clear()  # what it remembers of this batch is not kept
            raise
        self._loaded.kept |= rows.keys()
        self._loaded.last |= last
        self.changes.spans += rows.values()
        self.changes.feed += [(key, "spans", status, None) for key, status in touched.items()]

    def _span_row(self, span: Span, key: int, sequence: int) -> SpanRow:
        if sequence > MAX_SEQUENCE:
            raise StoreError(f"attempt {span.attempt_id!r} has no room for sequence {sequence}, above {MAX_SEQUENCE}")
        attempt = self._loaded.attempts.get(span.attempt_id)
        marked = mark_late(span, is_late=attempt is not None and attempt.status != "running")
        return key, sequence, span.span_id, self._packer.pack(marked, attempt=key, sequence=sequence)

    def remove(self, rollouts: Sequence[Rollout]) -> None:
        """The transaction does nothing else."""
        self.changes.removed += [self._loaded.seqs[rollout.rollout_id] for rollout in rollouts]

    def version(self, name: str, version: str) -> ResourceVersion | None:
        found = self._loaded.versions.get((name, version))
        return None if found is None else rules.copied(found)

    def add_version(self, version: ResourceVersion) -> None:
        self._loaded.versions[version.name, version.version] = version
        self.changes.versions.append((version.name, version.version, encode(version)))
        self.changes.feed.append((None, "resource", version.version, version.name))

    def save_state(self, states: Mapping[str, bytes]) -> None:
        """Write states by key; an empty value deletes the key."""
        self.changes.states |= {key: bytes(value) for key, value in states.items()}

    def log_metrics(self, metrics: Sequence[Metric]) -> None:
        """Log numbers."""
        for metric in metrics:
            key = (metric.experiment, metric.algorithm, metric.step, metric.name)
            self.changes.metrics[key] = (metric.value, metric.time)

    @property
    def has_spare(self) -> bool:
        """Whether queued rollouts are locked that none of the claims took: whoever skipped them must look again."""
        ids = [rollout_id for ids in self._loaded.queues.values() for rollout_id in ids]
        return any(self._loaded.rollouts[rollout_id].status == "queued" for rollout_id in ids)

    def _put(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            key = self._key(claim.rollout.rollout_id, claim.attempt.number)
            self._loaded.attempts[claim.attempt.attempt_id] = claim.attempt
            row = (claim.attempt.status, claim.attempt.claim_id, rules.deadline(claim), encode(claim.attempt))
            self.changes.attempts[key] = row

    def _key(self, rollout_id: str, number: int) -> int:
        return self._loaded.seqs[rollout_id] << ATTEMPT_BITS | number

    def _log(self, rollouts: Sequence[Rollout]) -> None:
        """Put the rollouts on the change feed as they are now."""
        for rollout in rollouts:
            key = self._key(rollout.rollout_id, rollout.attempts if rollout.attempt_id else 0)
            self.changes.feed.append((key, "rollout", rollout.status, None))
            self.changes.has_queued |= rollout.status == "queued"
