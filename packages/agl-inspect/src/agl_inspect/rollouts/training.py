"""Records how the steps of an experiment used each rollout, in spans that belong to the rollout.

A record belongs to a rollout and not to an attempt: it is copied, archived and removed with the rollout. The record is
written before its step is saved, so that every saved step has its records. A step that is repeated after a crash either
writes the same record again, which the store ignores, or a newer one, which replaces the earlier one.
"""

import hashlib
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import msgspec

from agl.contracts import CallUse, Store
from agl.errors import NotFoundError
from agl.schemas import Record, Span, encode
from agl_inspect.records.state import load_algorithm

TRAINING = "agl.training"
"""The span attribute that holds a :class:`TrainingRecord`."""

_BATCH = 8 << 20
"""A batch of records is sent to the store once it has this size in bytes."""

_CALL_BYTES = 400
"""Rough size in bytes of a call's record, without the values of its tokens."""


class TrainingRecord(Record, frozen=True, kw_only=True, omit_defaults=False):
    """How a step of an algorithm used one rollout.

    Attributes:
        step: The step, from 1; 0 for a rollout of another algorithm that was left out before any step.
        note: The reason why the rollout was left out as a whole; ``""`` if a step looked at it.
        calls: The use of each of the rollout's calls.
    """

    experiment: str
    run: int
    algorithm: str
    step: int
    note: str = ""
    calls: tuple[CallUse, ...] = ()

    @property
    def is_trained(self) -> bool:
        """True if the step trained on at least one call."""
        return any(call.row >= 0 for call in self.calls)

    @property
    def is_silent(self) -> bool:
        """True if the rollout taught the step nothing: every advantage is 0, or no call trained."""
        used = [call for call in self.calls if call.row >= 0]
        return all(call.advantage == 0 and not call.tokens.get("advantage") for call in used)


async def save_training(store: Store, records: Mapping[str, TrainingRecord]) -> None:
    """Append records, given by rollout id, to the rollouts; rollouts that have been removed are skipped."""
    batch: list[Span] = []
    size = 0
    for rollout_id, record in records.items():
        batch.append(_span(rollout_id, record))
        size += sum(_CALL_BYTES + sum(map(len, call.tokens.values())) for call in record.calls)
        if size >= _BATCH:
            await _append(store, batch)
            batch, size = [], 0
    if batch:
        await _append(store, batch)


def training_of(spans: Iterable[Span]) -> list[TrainingRecord]:
    """Return a rollout's training records in order of time; of several records of a step, only the newest."""
    found: dict[tuple[str, int, str, int], TrainingRecord] = {}
    for span in sorted(
        # Agents write spans of their own attempts only, so a span without an attempt is the experiment's.
        (span for span in spans if not span.attempt_id and TRAINING in span.attributes),
        key=lambda span: (span.start_ns, span.sequence),
    ):
        record = msgspec.convert(span.attributes[TRAINING], TrainingRecord)
        key = (record.experiment, record.run, record.algorithm, record.step)
        found.pop(key, None)
        found[key] = record
    return list(found.values())


def uses_of(spans: Iterable[Span]) -> dict[str, CallUse]:
    """Return how steps used a rollout's calls, by span id; a step that trained on a call takes precedence."""
    found: dict[str, CallUse] = {}
    for use in (use for record in training_of(spans) for use in record.calls):
        if use.row >= 0 or use.span_id not in found or found[use.span_id].row < 0:
            found[use.span_id] = use
    return found


def token_values(call: CallUse, name: str) -> list[float]:
    """Return one number, such as the ``entropy``, for each sampled token of a call; empty if none were reported."""
    packed = call.tokens.get(name, b"")
    count = len(packed) // 2
    return list(struct.unpack(f"<{count}e", packed[: 2 * count]))


def _span(rollout_id: str, record: TrainingRecord) -> Span:
    now = time.time_ns()
    return Span(
        rollout_id=rollout_id,
        attempt_id="",
        span_id=hashlib.blake2b(encode(record), digest_size=8).hexdigest(),
        name=f"training by {record.algorithm}, step {record.step}"
        if record.step
        else f"not used by {record.algorithm}",
        start_ns=now,
        end_ns=now,
        attributes={TRAINING: msgspec.to_builtins(record)},
    )


async def _append(store: Store, spans: Sequence[Span]) -> None:
    try:
        await store.append_spans(spans)
    except NotFoundError:
        for span in spans:
            with suppress(NotFoundError):
                await store.append_spans([span])


async def is_saved(store: Store, rollout_id: str, record: TrainingRecord) -> bool:
    """Return false if a record's step trained, but the process ended before that step was saved."""
    if not record.is_trained or not await store.experiments(record.experiment):
        return True
    steps = await store.trained(record.experiment, run=record.run, algorithm=record.algorithm, rollout_ids=[rollout_id])
    own = steps.get(rollout_id)
    if own is None or own >= record.step:
        return own == record.step
    # The ledger holds the step that collected the rollout and trained on it; a later step replayed the rollout.
    state = await load_algorithm(store, record.experiment, record.run, record.algorithm)
    return state is None or state.step >= record.step
