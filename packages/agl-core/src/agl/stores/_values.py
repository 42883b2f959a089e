"""Checks and copies the values that are written to a store, by the same rules for all stores."""

import logging
import re
import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from agl.contracts import ExperimentRecord, LabelMove, Metric, Presence, Recording
from agl.errors import ConflictError, InvalidIdError, InvalidRecordError, StoreError
from agl.schemas import LLM, MAX_ATTEMPTS, ResourceVersion, RetryPolicy, Rollout, Span
from agl.schemas import _codec as codec
from agl.schemas._ids import attempt_id_of, rollout_id_of

_R = TypeVar("_R")

_LOG = logging.getLogger(__name__)

DAMAGE = (ValueError, RecursionError, zlib.error)
"""The errors of decoding a stored record that is damaged."""

MAX_SEQUENCE = (1 << 24) - 1
"""The highest sequence that a span can have within its attempt."""

# Halves of characters (surrogates) cannot be encoded as UTF-8, and a slash would end a part of a path in a URL.
_ID = re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff/]{1,256}")

_IDS: dict[type, Sequence[str]] = {
    **{Rollout: ("rollout_id", "experiment"), ResourceVersion: ("name", "version"), LabelMove: ("label",)},
    **{ExperimentRecord: ("name",), Presence: ("experiment", "member"), Metric: ("experiment",)},
}
"""Maps each record type to its fields that hold new ids and names."""

_MAY_BE_EMPTY = ("experiment", "member")


def check_ids(values: Iterable[object]) -> None:
    """Raise :class:`InvalidIdError` if a record, or a record in a list, has an id or a name that stores refuse."""
    for value in values:
        for field in _IDS.get(type(value), ()):
            text: str = getattr(value, field)
            if not _ID.fullmatch(text) and (text or field not in _MAY_BE_EMPTY):
                raise InvalidIdError(
                    f"{field} {text[:80]!a} of a {type(value).__name__} has {len(text)} characters; an id or a name "
                    "has 1 to 256, without slashes, control characters and halves of characters: choose another"
                )
        if isinstance(value, list | tuple):
            check_ids(cast("Sequence[object]", value))


def is_name(text: str) -> bool:
    """True for a text that stores accept as an id or a name."""
    return _ID.fullmatch(text) is not None


def new_rollout(rollout: Rollout, *, now: float) -> Rollout:
    """A copy of the rollout, ready for the queue.

    Raises:
        StoreError: The rollout was started before, or allows too many attempts.
    """
    if rollout.status != "queued" or rollout.attempts or rollout.attempt_id is not None:
        raise ConflictError(
            f"rollout {rollout.rollout_id!r} is unknown here and comes as {rollout.status!r} with "
            f"{rollout.attempts} attempts; only new rollouts can be queued: give it status 'queued' and no attempts"
        )
    # Stores keep the number of an attempt in 14 bits of a key, and a limit of 0 attempts would
    # queue a rollout that is never tried.
    for name, least in (("max_attempts", 1), ("max_losses", 0)):
        limit: int = getattr(rollout.retry, name)
        if not least <= limit <= MAX_ATTEMPTS:
            raise StoreError(
                f"rollout {rollout.rollout_id!r} has retry.{name} = {limit}; choose between {least} and {MAX_ATTEMPTS}"
            )
    # The store's clock, unless the rollout is copied from another store.
    return replace(rollout, created_at=rollout.created_at or now)


def copied(value: Any) -> Any:
    """A deep copy of a record, or of the records in a list; other values are returned as they are.

    Raises:
        InvalidRecordError: A value in a record has another type than its field, is not JSON, or is an integer that
            takes more than 64 bits.
    """
    if isinstance(value, list | tuple):
        return [copied(each) for each in cast("Sequence[object]", value)]
    if not isinstance(value, Struct):
        return value
    if isinstance(value, Span) and value.call is not None and (value.call.request or value.call.response):
        # The long texts of a call may be any JSON, so their types need no check; they are encoded once, when stored.
        copied(replace(value, call=replace(value.call, request=None, response=None)))
        return value
    # Types are checked by decoding: a record that is made in Python may hold anything.
    data = encoded(value)
    try:
        return codec.decode(data, type(value))
    except ValueError as error:
        raise _unfit(value, error) from error


def readable(found: Iterable[bytes | None], type: type[_R]) -> list[_R]:
    """Decode records; one that cannot be read is logged and left out, so that it does not hide the others."""
    records: list[_R] = []
    for data in found:
        try:
            if data is not None:
                records.append(codec.decode(data, type))
        except DAMAGE as error:
            note_damage(f"a stored {type.__name__}", str(error))
    return records


@lru_cache(maxsize=10_000)
def note_damage(record: str, reason: str) -> None:
    """Log that a stored record cannot be read; the same record is logged once per process."""
    _LOG.warning("%s cannot be read (damaged, or of another version of agl): %s", record, reason)


def encoded(value: object) -> bytes:
    """Encode the value; raises :class:`InvalidRecordError` if it cannot be stored."""
    try:
        return codec.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _unfit(value, error) from error


def is_same(one: Struct, other: Struct) -> bool:
    """True if two storable records have equal content, where NaN equals NaN."""
    # Encoded, because NaN in a task differs from itself, and a resumed run would find its own rollouts in conflict.
    return one == other or codec.encode(one) == codec.encode(other)


def _unfit(value: object, error: Exception) -> InvalidRecordError:
    try:
        shown = str(value)[:200]
    except (ValueError, RecursionError):  # an integer of thousands of digits, or lists in lists
        shown = "too large to show"
    name = type(value).__name__
    if isinstance(value, Span):
        name = f"span {value.span_id!r} ({value.name!r}) of attempt {value.attempt_id!r}"
    return InvalidRecordError(
        f"{name} cannot be stored: {error}; values must be JSON: None, bool, int, float, str, list and dict with str "
        f"keys, and fields of the declared type; it was {shown}"
    )


def definition(rollout: Rollout) -> Rollout:
    """The part of a rollout that defines it: everything except progress, seed and retry policy.

    A rollout that is enqueued again must have an equal definition. A resumed run may have changed the retry policy.
    """
    # A rollout that is queued again may lack its seed or have another one; it is the same rollout.
    metadata = {key: value for key, value in rollout.metadata.items() if key != "seed"}
    return replace(unbegun(rollout), retry=RetryPolicy(), metadata=metadata, created_at=0.0)


def unbegun(rollout: Rollout) -> Rollout:
    """The rollout as it was when it was queued, without progress."""
    progress = {"attempts": 0, "failures": 0, "losses": 0, "started_at": 0.0, "finished_at": 0.0}
    return replace(rollout, status="queued", attempt_id=None, **progress)


def conflict(kind: str, key: str) -> ConflictError:
    """The error for an id that is written again with other content."""
    return ConflictError(
        f"{kind} {key!r} is already stored with other content; ids name one immutable value: "
        "repeat the same content, or choose a new id"
    )


def check_spans(spans: Sequence[Span], *, attempt_id: str | None = None) -> None:
    """Raise :class:`ConflictError` for a span that stores refuse.

    These are spans whose ids contradict each other or their outcome, and spans with a reward that is NaN or infinite.
    """
    for span in spans:
        # The last check: one stored NaN would make every average over it NaN.
        if span.reward is not None and span.reward.fault:
            raise ConflictError(
                f"span {span.span_id!r} of rollout {span.rollout_id!r} brings the reward {span.reward.name!r} with "
                f"{span.reward.fault}; give a finite number, or None when there is no reward"
            )
        if attempt_id is not None and span.attempt_id != attempt_id:
            raise ConflictError(
                f"span {span.span_id!r} belongs to attempt {span.attempt_id!r} and came with the outcome of "
                f"{attempt_id!r}; append it separately"
            )
        if span.attempt_id and rollout_id_of(span.attempt_id) != span.rollout_id:
            raise ConflictError(
                f"span {span.span_id!r} names rollout {span.rollout_id!r} and attempt {span.attempt_id!r} of another; "
                "set rollout_id to the attempt's rollout"
            )


def check_recording(recording: Recording) -> None:
    """Refuse a recording of another store that has an invalid id, or an attempt or a span of another rollout."""
    check_ids([recording.rollout])
    rollout_id = recording.rollout.rollout_id
    for attempt in recording.attempts:
        if (attempt.rollout_id, attempt.attempt_id) != (rollout_id, attempt_id_of(rollout_id, attempt.number)):
            raise ConflictError(
                f"the recording of rollout {rollout_id!r} has the attempt {attempt.attempt_id!r} of rollout "
                f"{attempt.rollout_id!r}; the file is damaged or was changed: get it again from where it was made"
            )
    most = max((attempt.number for attempt in recording.attempts), default=0)
    if not most <= recording.rollout.attempts <= MAX_ATTEMPTS:
        raise ConflictError(
            f"the recording of rollout {rollout_id!r} counts {recording.rollout.attempts} attempts and has number "
            f"{most}; the file is damaged or was changed: get it again from where it was made"
        )
    known = {"", *(attempt.attempt_id for attempt in recording.attempts)}
    for span in recording.spans:
        if span.rollout_id != rollout_id or span.attempt_id not in known:
            raise ConflictError(
                f"the recording of rollout {rollout_id!r} has the span {span.span_id!r} of attempt "
                f"{span.attempt_id!r} of rollout {span.rollout_id!r}; the file is damaged or was changed: get it again "
                "from where it was made"
            )
    check_spans(recording.spans)


def placed(span: Span, *, last: int, is_late: bool) -> Span:
    """Return the span as it will be stored, with ``is_late`` and with a sequence above ``last``.

    ``last`` is the highest sequence in the attempt so far.
    """
    # A higher number that the writer chose is kept, so that a copied attempt keeps its numbers.
    sequence = max(span.sequence, last + 1)
    if sequence > MAX_SEQUENCE:
        raise StoreError(f"attempt {span.attempt_id!r} has no room for sequence {sequence}, above {MAX_SEQUENCE}")
    return replace(span, sequence=sequence, is_late=is_late)


def check_secrets(version: ResourceVersion) -> None:
    """Raise :class:`ConflictError` if the version is an LLM with an API key."""
    if isinstance(version.resource, LLM) and version.resource.api_key:
        raise ConflictError(
            f"resource {version.name!r} version {version.version!r} holds an api_key, and a store keeps no secrets; "
            "set api_key_env to the name of the environment variable that holds the key"
        )
