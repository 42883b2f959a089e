"""The state machine of rollouts and attempts as pure functions of values and a clock reading.

All stores use these rules. ``now`` is Unix seconds throughout.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from agl import semconv
from agl._actors import NAMING, Enclosing
from agl.contracts import ExperimentRecord, LabelMove, Metric, Presence, RolloutQuery, SpanQuery
from agl.errors import ConflictError, FencedError, InvalidIdError, InvalidQueryError, StoreError
from agl.schemas import (
    LLM,
    Attempt,
    AttemptStatus,
    Claim,
    ErrorInfo,
    Outcome,
    ResourceVersion,
    RetryPolicy,
    Rollout,
    RolloutStatus,
    Span,
)
from agl.schemas import _codec as codec
from agl.schemas._ids import attempt_id_of, rollout_id_of
from agl.schemas._rollout import TERMINAL_ATTEMPT

_R = TypeVar("_R", bound=Struct)

MAX_SEQUENCE = (1 << 24) - 1
"""The highest sequence of a span of an attempt."""

MAX_COUNT = (1 << 63) - 1

_NAN = object()

_ID = re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff/]{1,256}")

_IDS: dict[type, Sequence[str]] = {
    **{Rollout: ("rollout_id", "experiment"), ResourceVersion: ("name", "version"), LabelMove: ("label",)},
    **{ExperimentRecord: ("name",), Presence: ("experiment", "member"), Metric: ("experiment",)},
}
"""The fields that name a new thing, by the record's type."""

_MAY_BE_EMPTY = ("experiment", "member")

MAX_ATTEMPTS = (1 << 14) - 1
"""The most attempts of one rollout, for which a store has room in its keys."""


def check_ids(values: Iterable[object]) -> None:
    """Raise :class:`InvalidIdError` for a record, also one in a list, whose id or name no store takes."""
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
    """True for a text that stores take as an id or a name."""
    return _ID.fullmatch(text) is not None


def new_rollout(rollout: Rollout, *, now: float) -> Rollout:
    """The rollout as it enters the queue, detached from the caller's values.

    Raises:
        StoreError: It is not in its first state, allows too many attempts, or holds what msgpack cannot carry.
    """
    if rollout.status != "queued" or rollout.attempts or rollout.attempt_id is not None:
        raise ConflictError(
            f"rollout {rollout.rollout_id!r} is unknown here and comes as {rollout.status!r} with "
            f"{rollout.attempts} attempts; only new rollouts can be queued: give it status 'queued' and no attempts"
        )
    for name, least in (("max_attempts", 1), ("max_losses", 0)):
        limit: int = getattr(rollout.retry, name)
        if not least <= limit <= MAX_ATTEMPTS:
            raise StoreError(
                f"rollout {rollout.rollout_id!r} has retry.{name} = {limit}; choose between {least} and {MAX_ATTEMPTS}"
            )
    return replace(copied(rollout), created_at=rollout.created_at or now)


def copied(record: _R) -> _R:
    """A deep copy of any record; raises :class:`StoreError` for what cannot be stored."""
    data = encoded(record)
    try:
        return codec.decode(data, type(record))
    except ValueError as error:
        raise _unfit(record, error) from error


def encoded(value: object) -> bytes:
    """The value as bytes; raises :class:`StoreError` for what cannot be stored."""
    try:
        return codec.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _unfit(value, error) from error


def is_same(one: Struct, other: Struct) -> bool:
    """True for two storable records with equal content; NaN equals itself here."""
    return one == other or _comparable(codec.to_builtins(one)) == _comparable(codec.to_builtins(other))


def _comparable(value: Any) -> Any:
    """A JSON value with NaN replaced by an object that equals itself."""
    if isinstance(value, dict):
        return {key: _comparable(item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list):
        return [_comparable(item) for item in cast("list[Any]", value)]
    return _NAN if isinstance(value, float) and math.isnan(value) else value


def _unfit(value: object, error: Exception) -> StoreError:
    try:
        shown = str(value)[:200]
    except (ValueError, RecursionError):  # an integer of thousands of digits, or lists in lists
        shown = "too large to show"
    return StoreError(
        f"{type(value).__name__} cannot be stored: {error}; values must be JSON: "
        f"None, bool, int, float, str, list and dict with str keys; it was {shown}"
    )


def select(rollouts: Sequence[Rollout], query: RolloutQuery) -> list[Rollout]:
    """The rollouts, named by id, that match a query, in its order."""
    wanted = [rollout for rollout in rollouts if is_wanted(rollout, query)]
    wanted.sort(key=sort_key(query), reverse=query.is_newest_first)
    return wanted[: query.limit]


def check_page(given: Mapping[str, object], *queries: object) -> None:
    """Raise :class:`InvalidQueryError` for a page, given or in a query, that no store can find."""
    for query in (*queries, *given.values()):
        if isinstance(query, RolloutQuery | SpanQuery):
            check_page({"limit": query.limit, "after": query.after})
        if isinstance(query, RolloutQuery):
            _check_start(query)
    for name in ("limit", "after"):
        if isinstance(value := given.get(name), int) and not 0 <= value <= MAX_COUNT:
            raise InvalidQueryError(f"{name} = {value}; choose between 0 and {MAX_COUNT}")


def _check_start(query: RolloutQuery) -> None:
    """Raise :class:`InvalidQueryError` for a page behind a rollout whose field to sort by has another type."""
    is_text = isinstance(query.after_value, str)
    if query.after and query.sort != "rollout_id" and is_text != (query.sort == "status"):
        raise InvalidQueryError(
            f"after_value = {query.after_value!r} is no {query.sort} of a rollout; take the query of a page from "
            "RolloutQuery.next, which sets it"
        )


def sort_key(query: RolloutQuery) -> Callable[[Rollout], tuple[Any, str]]:
    """The key by which the rollouts of a query are sorted."""
    return attrgetter(query.sort, "rollout_id")


def start_of(query: RolloutQuery) -> tuple[Any, str]:
    """The key of the last rollout on the page before."""
    return query.after if query.sort == "rollout_id" else query.after_value, query.after


def is_wanted(rollout: Rollout, query: RolloutQuery) -> bool:
    """True if the rollout matches the query, apart from its limit and ids."""
    key, start = sort_key(query)(rollout), start_of(query)
    is_behind = not query.after or (key < start if query.is_newest_first else key > start)
    return (
        is_behind
        and (query.contains in rollout.rollout_id or query.contains in codec.to_json(rollout.task).decode())
        and query.experiment in (None, rollout.experiment)
        and query.mode in (None, rollout.mode)
        and query.group_id in (None, rollout.group_id)
        and (not query.status or rollout.status in query.status)
    )


def bare(span: Span) -> Span:
    """The span without its contents, to find the actors around others."""
    names = {key: value for key, value in span.attributes.items() if key in NAMING or key == semconv.FRAMEWORK_SPAN_ID}
    if span.call is not None or span.reward is not None:  # else its name would be that of an operation around others
        names.setdefault(semconv.OPERATION, "")
    return replace(span, attributes=names, events=(), call=None, reward=None)


def is_chosen(span: Span, query: SpanQuery, around: Enclosing) -> bool:
    """True if a query selects the span, apart from its attempt and sequence."""
    operation = str(span.attributes.get(semconv.OPERATION, "")).rpartition("_")[2]
    kind = "call" if span.call is not None else "reward" if span.reward is not None else operation
    is_named = query.name in ("", span.name) and query.contains in span.name
    return is_named and query.kind in ("", kind) and query.agent in ("", around.who(span).agent)


def definition(rollout: Rollout) -> Rollout:
    """The rollout without its progress and seed, and without its retry policy, which a resumed run may have changed."""
    metadata = {key: value for key, value in rollout.metadata.items() if key != "seed"}
    return replace(unbegun(rollout), retry=RetryPolicy(), metadata=metadata, created_at=0.0)


def unbegun(rollout: Rollout) -> Rollout:
    """The rollout as it was queued."""
    progress = {"attempts": 0, "failures": 0, "losses": 0, "started_at": 0.0, "finished_at": 0.0}
    return replace(rollout, status="queued", attempt_id=None, **progress)


def conflict(kind: str, key: str) -> ConflictError:
    """The error for a repeated id with other content."""
    return ConflictError(
        f"{kind} {key!r} is already stored with other content; ids name one immutable value: "
        "repeat the same content, or choose a new id"
    )


def open_attempt(rollout: Rollout, *, worker: str, claim_id: str, lease_s: float, now: float) -> Claim:
    """The queued rollout as running, with its next attempt."""
    number = rollout.attempts + 1
    attempt = Attempt(
        attempt_id=attempt_id_of(rollout.rollout_id, number),
        rollout_id=rollout.rollout_id,
        number=number,
        worker=worker,
        claim_id=claim_id,
        lease_until=now + lease_s,
        lease_s=lease_s,
        started_at=now,
    )
    began = rollout.started_at or now
    running = replace(rollout, status="running", attempts=number, attempt_id=attempt.attempt_id, started_at=began)
    return Claim(rollout=running, attempt=attempt)


def release(claim: Claim) -> Rollout:
    """The rollout as it was before an attempt that its claimer never received."""
    number = claim.attempt.number - 1
    started_at = claim.rollout.started_at if number else 0.0
    return replace(claim.rollout, status="queued", attempts=number, attempt_id=None, started_at=started_at)


def timeout_at(claim: Claim) -> float:
    """The time at which the attempt outlives ``retry.timeout_s`` and its grace; infinity without a limit."""
    retry = claim.rollout.retry
    return math.inf if retry.timeout_s is None else claim.attempt.started_at + retry.timeout_s + retry.grace_s


def deadline(claim: Claim) -> float:
    """The time at which the running attempt lapses or times out."""
    return min(claim.attempt.lease_until, timeout_at(claim))


def lapse(claim: Claim, *, now: float) -> Claim | None:
    """The claim with its overdue attempt decided as ``timeout`` or ``lost``; ``None`` while it is in time."""
    if claim.attempt.status != "running" or deadline(claim) > now:
        return None
    attempt = claim.attempt
    if timeout_at(claim) <= attempt.lease_until:
        message = f"attempt {attempt.attempt_id} ran longer than retry.timeout_s = {claim.rollout.retry.timeout_s:g}"
        return decide(claim, status="timeout", error=ErrorInfo(type="agl.Timeout", message=message), now=now)
    message = f"worker {attempt.worker!r} did not renew its lease on attempt {attempt.attempt_id} in time"
    return decide(claim, status="lost", error=ErrorInfo(type="agl.LeaseLapsed", message=message), now=now)


def decide(claim: Claim, *, status: AttemptStatus, error: ErrorInfo | None, now: float) -> Claim:
    """The claim after its running attempt ended with ``status``: final, or queued again by the retry policy.

    Only failures and timeouts count against ``max_attempts``. Lost workers have a limit of their own, and an attempt
    that was given back, ``lost`` without an error, counts against neither.
    """
    is_failure, is_loss = status in ("failed", "timeout"), status == "lost" and error is not None
    rollout = replace(
        claim.rollout, failures=claim.rollout.failures + is_failure, losses=claim.rollout.losses + is_loss
    )
    if status == "lost" and rollout.retry.max_losses and not _may_lose_more(rollout):
        error = _quarantined(rollout, error)
    attempt = replace(claim.attempt, status=status, error=error, finished_at=now)
    if _is_repeated(rollout, status):
        return Claim(rollout=replace(rollout, status="queued", attempt_id=None), attempt=attempt)
    return Claim(rollout=replace(rollout, status=_FINAL.get(status, "failed"), finished_at=now), attempt=attempt)


def _is_repeated(rollout: Rollout, status: AttemptStatus) -> bool:
    """True if a rollout, whose counts include the ended attempt, has another one."""
    if status == "lost":
        return _may_lose_more(rollout)
    may_fail_more = rollout.failures < rollout.retry.max_attempts and rollout.attempts < MAX_ATTEMPTS
    return status in ("failed", "timeout") and status in rollout.retry.retry_on and may_fail_more


def _may_lose_more(rollout: Rollout) -> bool:
    return rollout.losses <= rollout.retry.max_losses and rollout.attempts < MAX_ATTEMPTS


def _quarantined(rollout: Rollout, last: ErrorInfo | None) -> ErrorInfo:
    """The error of a rollout that is not tried again, because it may be the cause of the losses."""
    cause = "it may end the process that runs it, such as by using up its memory"
    if rollout.losses <= rollout.retry.max_losses:
        cause = "a store can number no more attempts of it"
    ending = f". {last.message}" if last else ""
    message = (
        f"the rollout lost its worker in {rollout.losses} of {rollout.attempts} attempts and is not tried again: "
        f"{cause}. Queue it under a new id or with a higher max_losses to try it once more{ending}"
    )
    return ErrorInfo(type="agl.Quarantined", message=message)


def settle(claim: Claim, outcome: Outcome, *, now: float) -> Claim | None:
    """The claim after ``outcome``; ``None`` when the outcome repeats the recorded one.

    Raises:
        FencedError: The attempt was decided otherwise.
        ConflictError: The outcome's status does not end an attempt.
    """
    attempt = claim.attempt
    if outcome.status not in TERMINAL_ATTEMPT:
        raise ConflictError(
            f"attempt {attempt.attempt_id!r} cannot finish as {outcome.status!r}; "
            f"an outcome is one of {sorted(TERMINAL_ATTEMPT)}"
        )
    if attempt.status == "running":
        return decide(claim, status=outcome.status, error=outcome.error, now=now)
    if attempt.status == outcome.status and (attempt.status == "lost" or attempt.error == outcome.error):
        return None
    why = f" ({attempt.error.message})" if attempt.error else ""
    raise FencedError(
        f"attempt {attempt.attempt_id!r} was already decided as {attempt.status!r}{why} and cannot finish as "
        f"{outcome.status!r}; drop this outcome: the rollout went on without it"
    )


def check_spans(spans: Sequence[Span], *, attempt_id: str | None = None) -> None:
    """Raise :class:`ConflictError` for a span that no store takes.

    Its ids contradict each other or the outcome that brings it, or its reward is NaN or infinite.
    """
    for span in spans:
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


def placed(span: Span, *, last: int, is_late: bool) -> Span:
    """The span with its sequence, above ``last`` of its attempt; ``is_late`` if the attempt is decided."""
    sequence = max(span.sequence, last + 1)
    if sequence > MAX_SEQUENCE:
        raise StoreError(f"attempt {span.attempt_id!r} has no room for sequence {sequence}, above {MAX_SEQUENCE}")
    return replace(span, sequence=sequence, is_late=is_late)


def check_secrets(version: ResourceVersion) -> None:
    """Raise :class:`ConflictError` for an LLM that carries its key."""
    if isinstance(version.resource, LLM) and version.resource.api_key:
        raise ConflictError(
            f"resource {version.name!r} version {version.version!r} holds an api_key, and a store keeps no secrets; "
            "set api_key_env to the name of the environment variable that holds the key"
        )


_FINAL: dict[AttemptStatus, RolloutStatus] = {"succeeded": "succeeded", "cancelled": "cancelled"}
"""The status of a rollout after its last attempt, if it is not ``failed``."""
