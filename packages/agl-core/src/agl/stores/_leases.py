"""The life of an attempt as pure functions: opening, losing, finishing and retrying it. All stores use these rules.

A worker holds an attempt only as long as it renews the lease. A worker that dies sends no message, so only the clock
shows its loss: :func:`end_overdue` decides an attempt whose lease ran out as ``lost``, and one that outlived its time
limit as ``timeout``. Every transaction of a store does this first (:func:`agl.stores.expire`), and stores wake up at
the next deadline. ``now`` is Unix seconds throughout.
"""

import math

from msgspec.structs import replace

from agl.errors import ConflictError, FencedError
from agl.schemas import MAX_ATTEMPTS, Attempt, AttemptStatus, Claim, ErrorInfo, Outcome, Rollout, RolloutStatus
from agl.schemas._ids import attempt_id_of
from agl.schemas._rollout import TERMINAL_ATTEMPT

_FINAL: dict[AttemptStatus, RolloutStatus] = {"succeeded": "succeeded", "cancelled": "cancelled"}
"""Maps the last attempt's status to the rollout's final status; every other status leads to ``failed``."""


def open_attempt(rollout: Rollout, *, worker: str, claim_id: str, lease_s: float, now: float) -> Claim:
    """Open the next attempt of a queued rollout; returns the attempt with the rollout, which is now running."""
    number = rollout.attempts + 1
    attempt = Attempt(
        # Derived, so that a claim that is repeated after a crash of the store names the same
        # attempt.
        attempt_id=attempt_id_of(rollout.rollout_id, number),
        rollout_id=rollout.rollout_id,
        number=number,
        worker=worker,
        claim_id=claim_id,
        lease_until=now + lease_s,
        lease_s=lease_s,
        started_at=now,
    )
    # The start of the first attempt: the time of a rollout includes its failed attempts.
    began = rollout.started_at or now
    running = replace(rollout, status="running", attempts=number, attempt_id=attempt.attempt_id, started_at=began)
    return Claim(rollout=running, attempt=attempt)


def release(claim: Claim) -> Rollout:
    """The rollout as it was before ``claim``; used if the claimer never received the attempt."""
    number = claim.attempt.number - 1
    started_at = claim.rollout.started_at if number else 0.0
    return replace(claim.rollout, status="queued", attempts=number, attempt_id=None, started_at=started_at)


def timeout_at(claim: Claim) -> float:
    """The time at which the attempt outlives ``retry.timeout_s`` plus ``retry.grace_s``; infinity without a limit."""
    retry = claim.rollout.retry
    # The worker stops its agent at timeout_s, for which it has grace_s. This later limit is for
    # workers that fail to do so.
    return math.inf if retry.timeout_s is None else claim.attempt.started_at + retry.timeout_s + retry.grace_s


def deadline(claim: Claim) -> float:
    """The time at which the running attempt loses its lease or times out, whichever is earlier."""
    # Whichever comes first: a worker that renews its lease for ever must not keep an attempt for
    # ever.
    return min(claim.attempt.lease_until, timeout_at(claim))


def end_overdue(claim: Claim, *, now: float) -> Claim | None:
    """Decide an overdue attempt as ``lost`` or ``timeout``, and return its claim; ``None`` if it is not overdue.

    ``lost`` means that the worker did not renew its lease: it died, hangs or cannot reach the store.
    """
    if claim.attempt.status != "running" or deadline(claim) > now:
        return None
    attempt = claim.attempt
    # When the store looks, both deadlines may have passed; the earlier one counts.
    if timeout_at(claim) <= attempt.lease_until:
        message = f"attempt {attempt.attempt_id} ran longer than retry.timeout_s = {claim.rollout.retry.timeout_s:g}"
        return decide(claim, status="timeout", error=ErrorInfo(type="agl.Timeout", message=message), now=now)
    message = f"worker {attempt.worker!r} did not renew its lease on attempt {attempt.attempt_id} in time"
    return decide(claim, status="lost", error=ErrorInfo(type="agl.LeaseLapsed", message=message), now=now)


def decide(claim: Claim, *, status: AttemptStatus, error: ErrorInfo | None, now: float) -> Claim:
    """End the running attempt with ``status``; the retry policy decides whether the rollout is queued again.

    Only failures and timeouts count towards ``max_attempts``, and lost workers towards ``max_losses``. An attempt that
    was given back, which is ``lost`` without an error, counts towards neither.
    """
    # An attempt that its worker gave back, in good order and without an error, is nobody's fault.
    is_failure, is_loss = status in ("failed", "timeout"), status == "lost" and error is not None
    rollout = replace(
        claim.rollout, failures=claim.rollout.failures + is_failure, losses=claim.rollout.losses + is_loss
    )
    # With max_losses = 0 the user asked for no second try, so the rollout is not called a killer of
    # workers.
    if status == "lost" and rollout.retry.max_losses and not _may_lose_more(rollout):
        error = _quarantined(rollout, error)
    attempt = replace(claim.attempt, status=status, error=error, finished_at=now)
    if _is_repeated(rollout, status):
        return Claim(rollout=replace(rollout, status="queued", attempt_id=None), attempt=attempt)
    return Claim(rollout=replace(rollout, status=_FINAL.get(status, "failed"), finished_at=now), attempt=attempt)


def _is_repeated(rollout: Rollout, status: AttemptStatus) -> bool:
    """True if a rollout gets another attempt; the rollout's counts already include the attempt that ended."""
    if status == "lost":
        return _may_lose_more(rollout)
    may_fail_more = rollout.failures < rollout.retry.max_attempts and rollout.attempts < MAX_ATTEMPTS
    # Success and cancellation are never repeated, whatever retry_on says.
    return status in ("failed", "timeout") and status in rollout.retry.retry_on and may_fail_more


def _may_lose_more(rollout: Rollout) -> bool:
    return rollout.losses <= rollout.retry.max_losses and rollout.attempts < MAX_ATTEMPTS


def _quarantined(rollout: Rollout, last: ErrorInfo | None) -> ErrorInfo:
    """The error of a rollout that lost too many workers and is not tried again."""
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
    """Apply an outcome to a claim; returns ``None`` if the same outcome was applied before.

    Raises:
        FencedError: The attempt has another outcome already.
        ConflictError: The outcome's status does not end an attempt.
    """
    attempt = claim.attempt
    if outcome.status not in TERMINAL_ATTEMPT:
        raise ConflictError(
            f"attempt {attempt.attempt_id!r} cannot finish as {outcome.status!r}; "
            f"an outcome is one of {sorted(TERMINAL_ATTEMPT)}"
        )
    # The usual way; all else is a repetition, or a worker that comes too late.
    if attempt.status == "running":
        return decide(claim, status=outcome.status, error=outcome.error, now=now)
    # The answer to an earlier call may have been lost on the way; the same outcome again is
    # harmless.
    if attempt.status == outcome.status and (attempt.status == "lost" or attempt.error == outcome.error):
        return None
    why = f" ({attempt.error.message})" if attempt.error else ""
    raise FencedError(
        f"attempt {attempt.attempt_id!r} was already decided as {attempt.status!r}{why} and cannot finish as "
        f"{outcome.status!r}; drop this outcome: the rollout went on without it"
    )
