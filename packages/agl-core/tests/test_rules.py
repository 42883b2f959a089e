"""The state machine that every store follows, as functions of values and a clock reading."""

import math

import pytest
from msgspec.structs import replace

from agl.errors import ConflictError, FencedError, StoreError
from agl.schemas import (
    LLM,
    MAX_ATTEMPTS,
    Attempt,
    AttemptStatus,
    Claim,
    ErrorInfo,
    JsonResource,
    Outcome,
    PromptTemplate,
    ResourceVersion,
    RetryPolicy,
    Rollout,
    RolloutStatus,
    Span,
)
from agl.stores import MemoryStore
from agl.stores import _leases as leases
from agl.stores import _values as values

FAILED = ErrorInfo(type="ValueError", message="boom")


def queued(rollout_id: str = "a", **fields: object) -> Rollout:
    return Rollout(rollout_id=rollout_id, task={"q": 1}, **fields)  # pyright: ignore[reportArgumentType]  # shorthand


def claim(*, now: float = 100.0, lease_s: float = 60.0, **rollout: object) -> Claim:
    """Return a claim whose attempt was opened at ``now``."""
    created = values.new_rollout(queued(**rollout), now=50.0)  # pyright: ignore[reportArgumentType]  # shorthand
    return leases.open_attempt(created, worker="w", claim_id="c", lease_s=lease_s, now=now)


def test_new_rollout_is_detached_and_knows_when_it_came() -> None:
    given = queued()
    made = values.new_rollout(values.copied(given), now=5.0)
    assert replace(given, created_at=5.0) == made
    assert made.task is not given.task
    assert 3.0 == values.new_rollout(queued(created_at=3.0), now=5.0).created_at


@pytest.mark.parametrize("fields", [{"status": "running"}, {"attempts": 1}, {"attempt_id": "a.1"}])
def test_new_rollout_must_be_in_its_first_state(fields: dict[str, object]) -> None:
    with pytest.raises(ConflictError, match=r"'a' is unknown here and comes as '\w+' with [01] attempts; only new"):
        values.new_rollout(queued(**fields), now=5.0)


@pytest.mark.parametrize(("name", "least"), [("max_attempts", 1), ("max_losses", 0)])
def test_limits_of_a_new_rollout_are_within_the_attempts_that_a_store_can_number(name: str, least: int) -> None:
    for limit in (least, 16383):
        assert values.new_rollout(queued(retry=RetryPolicy(**{name: limit})), now=0.0)
    for limit in (least - 1, 16384):
        with pytest.raises(StoreError, match=rf"'a' has retry.{name} = {limit}; choose between {least} and 16383"):
            values.new_rollout(queued(retry=RetryPolicy(**{name: limit})), now=0.0)


@pytest.mark.parametrize("task", [object(), "\ud800", 2**70])
def test_value_that_cannot_be_stored_is_named(task: object) -> None:
    with pytest.raises(StoreError, match=r"^Rollout cannot be stored: .+; values must be JSON: .*; it was Rollout\("):
        values.copied(Rollout(rollout_id="a", task=task))  # pyright: ignore[reportArgumentType]
    with pytest.raises(StoreError) as caught:
        values.copied(Rollout(rollout_id="a" * 500, task=task))  # pyright: ignore[reportArgumentType]
    assert str(caught.value).endswith("(rollout_id='" + "a" * 180)


def test_nan_is_no_change_of_a_repeated_record() -> None:
    def rollout(value: float, **more: object) -> Rollout:
        return queued(metadata={"seed": 1, "scores": [{"x": value}, None]}, **more)

    assert values.is_same(rollout(math.nan), values.copied(rollout(float("nan"))))
    assert not values.is_same(rollout(math.nan), rollout(1.0))
    assert not values.is_same(rollout(math.nan), rollout(math.nan, experiment="x"))


async def test_nan_in_a_task_or_a_resource_may_be_sent_again() -> None:
    store = MemoryStore()
    rollout = Rollout(rollout_id="a", task={"x": math.nan, 2: [1.0]})
    version = ResourceVersion(name="n", version="1", resource=JsonResource(value={"x": [math.nan]}))
    for _ in range(2):
        assert ["a"] == [each.rollout_id for each in await store.enqueue([replace(rollout)])]
        await store.publish([values.copied(version)])
    with pytest.raises(ConflictError, match="'a' is already stored with other content"):
        await store.enqueue([replace(rollout, task={"x": math.nan, 2: [2.0]})])
    with pytest.raises(ConflictError, match="'n@1' is already stored with other content"):
        await store.publish([replace(version, resource=JsonResource(value={"x": [1.0]}))])


def test_value_that_is_too_deep_or_too_long_to_show_is_refused_like_others() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    for task in (deep, 2**20_000):
        with pytest.raises(StoreError, match=r"^Rollout cannot be stored: .*it was too large to show"):
            values.copied(Rollout(rollout_id="a", task=task))


def test_definition_is_a_rollout_without_its_progress() -> None:
    done = replace(
        queued(metadata={"step": 1}),
        status="succeeded",
        attempts=2,
        failures=1,
        losses=1,
        attempt_id="a.2",
        created_at=1.0,
        started_at=2.0,
        finished_at=3.0,
    )
    assert queued(metadata={"step": 1}) == values.definition(done)
    assert values.definition(done) == values.definition(queued(metadata={"step": 1}))
    assert values.definition(done) != values.definition(queued())


def test_rollout_of_another_seed_is_the_same_rollout() -> None:
    """A step in flight must go on after an upgrade, and a copied rollout must keep its seed."""
    older, seeded = queued(metadata={"step": 1}), queued(metadata={"step": 1, "seed": 7})
    assert values.definition(older) == values.definition(seeded)
    assert seeded == values.unbegun(seeded)


def test_rollout_with_another_retry_policy_is_the_same_rollout() -> None:
    """A run may be resumed with another time limit or number of attempts."""
    older = queued(retry=RetryPolicy(max_attempts=3, retry_on=("lost", "failed"), timeout_s=9.0))
    assert values.definition(older) == values.definition(queued())
    assert values.definition(queued(hidden=("answer",))) != values.definition(queued())


def test_conflict_names_what_is_repeated() -> None:
    expected = (
        "span 's1' is already stored with other content; ids name one immutable value: "
        "repeat the same content, or choose a new id"
    )
    assert expected == str(values.conflict("span", "s1"))


def test_open_attempt_leases_the_next_attempt() -> None:
    expected = Attempt(
        attempt_id="a.1",
        rollout_id="a",
        number=1,
        worker="w",
        claim_id="c",
        lease_until=160.0,
        lease_s=60.0,
        started_at=100.0,
    )
    opened = claim()
    assert expected == opened.attempt
    assert queued(status="running", attempts=1, attempt_id="a.1", created_at=50.0, started_at=100.0) == opened.rollout


def test_open_attempt_keeps_when_the_first_one_started() -> None:
    first = leases.decide(claim(retry=RetryPolicy(max_attempts=2)), status="failed", error=FAILED, now=120.0)
    second = leases.open_attempt(first.rollout, worker="v", claim_id="", lease_s=1.0, now=130.0)
    assert ("a.2", 2, 130.0, 131.0) == (
        second.attempt.attempt_id,
        second.attempt.number,
        second.attempt.started_at,
        second.attempt.lease_until,
    )
    assert (2, "a.2", 100.0) == (second.rollout.attempts, second.rollout.attempt_id, second.rollout.started_at)


def test_release_takes_an_attempt_back_that_nobody_saw() -> None:
    assert queued(created_at=50.0) == leases.release(claim())
    first = leases.decide(claim(retry=RetryPolicy(max_attempts=2)), status="failed", error=FAILED, now=120.0)
    second = leases.open_attempt(first.rollout, worker="v", claim_id="", lease_s=1.0, now=130.0)
    assert first.rollout == leases.release(second)


def test_deadline_is_the_lease_or_the_time_limit_with_its_grace() -> None:
    assert (math.inf, 160.0) == (leases.timeout_at(claim()), leases.deadline(claim()))
    limited = claim(retry=RetryPolicy(timeout_s=20.0, grace_s=5.0))
    assert (125.0, 125.0) == (leases.timeout_at(limited), leases.deadline(limited))
    assert 110.0 == leases.deadline(claim(lease_s=10.0, retry=RetryPolicy(timeout_s=20.0)))


def test_attempt_in_time_does_not_lapse() -> None:
    assert leases.end_overdue(claim(), now=159.9) is None
    ended = leases.decide(claim(), status="succeeded", error=None, now=110.0)
    assert leases.end_overdue(ended, now=999.0) is None


def test_attempt_whose_lease_ran_out_is_lost() -> None:
    lapsed = leases.end_overdue(claim(), now=160.0)
    message = "worker 'w' did not renew its lease on attempt a.1 in time"
    expected = leases.decide(
        claim(), status="lost", error=ErrorInfo(type="agl.LeaseLapsed", message=message), now=160.0
    )
    assert expected == lapsed
    assert ("queued", 0, 1) == (expected.rollout.status, expected.rollout.failures, expected.rollout.losses)


@pytest.mark.parametrize("timeout_s", [20.0, 60.0])
def test_attempt_that_ran_too_long_is_a_timeout(timeout_s: float) -> None:
    running = claim(retry=RetryPolicy(timeout_s=timeout_s))
    message = f"attempt a.1 ran longer than retry.timeout_s = {timeout_s:g}"
    expected = leases.decide(running, status="timeout", error=ErrorInfo(type="agl.Timeout", message=message), now=170.0)
    assert expected == leases.end_overdue(running, now=170.0)


@pytest.mark.parametrize(
    ("status", "final"),
    [
        ("succeeded", "succeeded"),
        ("cancelled", "cancelled"),
        ("failed", "failed"),
        ("timeout", "failed"),
        ("lost", "failed"),
    ],
)
def test_last_attempt_decides_its_rollout(status: AttemptStatus, final: RolloutStatus) -> None:
    running = claim(retry=RetryPolicy(max_losses=0))
    decided = leases.decide(running, status=status, error=FAILED, now=120.0)
    assert replace(running.attempt, status=status, error=FAILED, finished_at=120.0) == decided.attempt
    counts = {"failures": int(status in ("failed", "timeout")), "losses": int(status == "lost")}
    assert replace(running.rollout, status=final, finished_at=120.0, **counts) == decided.rollout


def test_failed_attempt_is_repeated_while_the_policy_has_more() -> None:
    running = claim(retry=RetryPolicy(max_attempts=2))
    decided = leases.decide(running, status="failed", error=FAILED, now=120.0)
    assert replace(running.rollout, status="queued", attempt_id=None, failures=1) == decided.rollout
    last = leases.open_attempt(decided.rollout, worker="w", claim_id="", lease_s=1.0, now=130.0)
    assert "failed" == leases.decide(last, status="failed", error=FAILED, now=140.0).rollout.status


def test_policy_says_which_outcomes_are_repeated() -> None:
    strict = claim(retry=RetryPolicy(max_attempts=9, retry_on=("timeout",)))
    assert "failed" == leases.decide(strict, status="failed", error=FAILED, now=1.0).rollout.status
    assert "queued" == leases.decide(strict, status="timeout", error=FAILED, now=1.0).rollout.status
    odd = claim(retry=RetryPolicy(max_attempts=9, retry_on=("succeeded", "cancelled")))
    assert "succeeded" == leases.decide(odd, status="succeeded", error=None, now=1.0).rollout.status


def ended(rollout: Rollout, *outcomes: tuple[AttemptStatus, ErrorInfo | None]) -> Claim:
    """Return the last claim of a rollout after attempts with the given outcomes."""
    for status, error in outcomes:
        assert "queued" == rollout.status
        opened = leases.open_attempt(rollout, worker="w", claim_id="", lease_s=1.0, now=1.0)
        last = leases.decide(opened, status=status, error=error, now=2.0)
        rollout = last.rollout
    return last  # pyright: ignore[reportPossiblyUnboundVariable]  # there is an outcome


def test_attempt_that_was_given_back_counts_nowhere() -> None:
    returned = ended(queued(retry=RetryPolicy(max_losses=0)), *[("lost", None)] * 500)
    assert ("queued", 500, 0, 0) == (
        returned.rollout.status,
        returned.rollout.attempts,
        returned.rollout.failures,
        returned.rollout.losses,
    )
    assert returned.attempt.error is None
    assert "failed" == ended(returned.rollout, ("failed", None)).rollout.status


def test_lost_workers_leave_all_tries_to_the_agent() -> None:
    policy = RetryPolicy(max_attempts=2)
    losses: list[tuple[AttemptStatus, ErrorInfo | None]] = [("lost", FAILED)] * 20
    tried = ended(queued(retry=policy), *losses[:7], ("failed", FAILED), *losses[7:], ("timeout", FAILED))
    assert ("failed", 22, 2, 20) == (
        tried.rollout.status,
        tried.rollout.attempts,
        tried.rollout.failures,
        tried.rollout.losses,
    )
    assert FAILED == tried.attempt.error


def test_rollout_that_loses_too_many_workers_is_quarantined_by_name() -> None:
    tried = ended(queued(retry=RetryPolicy(max_losses=2)), *[("lost", FAILED)] * 3)
    assert ("failed", "lost") == (tried.rollout.status, tried.attempt.status)
    assert tried.attempt.error is not None
    assert "agl.Quarantined" == tried.attempt.error.type
    expected = "the rollout lost its worker in 3 of 3 attempts and is not tried again: it may end the process that runs"
    assert tried.attempt.error.message.startswith(expected)
    assert tried.attempt.error.message.endswith("higher max_losses to try it once more. boom")
    assert leases.settle(tried, Outcome(attempt_id="a.3", status="lost", error=FAILED), now=3.0) is None


@pytest.mark.parametrize("error", [None, FAILED])
@pytest.mark.parametrize("status", ["lost", "failed"])
def test_rollout_ends_with_the_last_attempt_that_a_store_can_number(
    status: AttemptStatus, error: ErrorInfo | None
) -> None:
    policy = RetryPolicy(max_attempts=9)
    before = replace(queued(retry=policy), attempts=MAX_ATTEMPTS - 2)
    assert "queued" == ended(before, (status, error)).rollout.status
    last = ended(replace(before, attempts=MAX_ATTEMPTS - 1), (status, error))
    assert ("failed", 16383) == (last.rollout.status, last.attempt.number)
    if status == "lost" and error is None:
        assert last.attempt.error is not None
        expected = "the rollout lost its worker in 0 of 16383 attempts and is not tried again: a store can"
        assert last.attempt.error.message.startswith(expected)
        assert last.attempt.error.message.endswith("to try it once more")


def test_last_attempt_that_a_store_can_number_is_named_as_the_cause_of_the_end() -> None:
    before = replace(queued(retry=RetryPolicy(max_losses=1)), attempts=MAX_ATTEMPTS - 1)
    error = ended(before, ("lost", FAILED)).attempt.error
    assert error is not None
    assert "in 1 of 16383 attempts and is not tried again: a store can number no more attempts of it" in error.message


def test_outcome_settles_a_running_attempt_once() -> None:
    running, outcome = claim(), Outcome(attempt_id="a.1", status="failed", error=FAILED)
    settled = leases.settle(running, outcome, now=120.0)
    assert leases.decide(running, status="failed", error=FAILED, now=120.0) == settled
    assert settled is not None
    assert leases.settle(settled, outcome, now=130.0) is None


@pytest.mark.parametrize(
    "other",
    [
        Outcome(attempt_id="a.1", status="succeeded", error=FAILED),
        Outcome(attempt_id="a.1", status="failed", error=replace(FAILED, message="other")),
    ],
)
def test_other_outcome_of_a_decided_attempt_is_fenced_off(other: Outcome) -> None:
    decided = leases.decide(claim(), status="failed", error=FAILED, now=120.0)
    expected = rf"^attempt 'a.1' was already decided as 'failed' \(boom\) and cannot finish as '{other.status}'; drop"
    with pytest.raises(FencedError, match=expected):
        leases.settle(decided, other, now=130.0)
    quiet = leases.decide(claim(), status="lost", error=None, now=120.0)
    with pytest.raises(FencedError, match="already decided as 'lost' and cannot"):
        leases.settle(quiet, other, now=130.0)


def test_outcome_must_be_a_decision() -> None:
    with pytest.raises(ConflictError, match=r"'a.1' cannot finish as 'running'; an outcome is one of \['cancelled'"):
        leases.settle(claim(), Outcome(attempt_id="a.1", status="running"), now=120.0)


def span(rollout_id: str = "a", attempt_id: str = "a.1") -> Span:
    return Span(rollout_id=rollout_id, attempt_id=attempt_id, span_id="s", name="n")


def test_spans_must_belong_together() -> None:
    values.check_spans([span(), span(attempt_id="")])
    values.check_spans([span()], attempt_id="a.1")
    with pytest.raises(ConflictError, match=r"'s' belongs to attempt 'a\.2' and came with the outcome of 'a\.1'"):
        values.check_spans([span(), span(attempt_id="a.2")], attempt_id="a.1")
    with pytest.raises(ConflictError, match=r"'s' names rollout 'b' and attempt 'a\.1' of another"):
        values.check_spans([span(), span(rollout_id="b")])


def test_spans_are_numbered_in_order_of_arrival_or_by_their_own_higher_number() -> None:
    span = Span(rollout_id="a", attempt_id="a.1", span_id="s", name="n")
    assert replace(span, sequence=5) == values.placed(span, last=4, is_late=False)
    assert replace(span, sequence=9, is_late=True) == values.placed(replace(span, sequence=9), last=4, is_late=True)
    assert replace(span, sequence=5) == values.placed(replace(span, sequence=2), last=4, is_late=False)
    full = values.MAX_SEQUENCE
    assert full == values.placed(span, last=full - 1, is_late=False).sequence
    with pytest.raises(StoreError, match=f"'a.1' has no room for sequence {full + 1}, above {full}"):
        values.placed(span, last=full, is_late=False)


def test_resources_hold_no_secret() -> None:
    def version(resource: LLM | PromptTemplate) -> ResourceVersion:
        return ResourceVersion(name="main", version="1", resource=resource)

    values.check_secrets(version(LLM(endpoint="http://x", model="m")))
    values.check_secrets(version(PromptTemplate(template="t")))
    with pytest.raises(ConflictError, match=r"'main' version '1' holds an api_key.*set api_key_env"):
        values.check_secrets(version(LLM(endpoint="http://x", model="m", api_key="sk-1")))
