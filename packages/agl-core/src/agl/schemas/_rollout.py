"""Rollouts and attempts: one run of the agent on one task, and the tries that it takes."""

from typing import Literal, TypeGuard

import msgspec

from agl.schemas._base import SCHEMA_VERSION, Int64, Json, Record
from agl.schemas._span import RewardSource, Span

Mode = Literal["train", "val", "test"]
"""The purpose of a rollout: to train, to choose between versions, or to measure a result that nothing learns from."""

RolloutStatus = Literal["queued", "running", "succeeded", "failed", "cancelled"]
"""The state of a rollout; the last three are final."""

AttemptStatus = Literal["running", "succeeded", "failed", "timeout", "lost", "cancelled"]
"""The state of an attempt: ``lost`` if its worker went away, ``timeout`` if it was stopped for taking too long."""

TERMINAL_ROLLOUT: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})
"""The statuses of a rollout that are final."""

TERMINAL_ATTEMPT: frozenset[str] = frozenset({"succeeded", "failed", "timeout", "lost", "cancelled"})
"""The statuses of an attempt that are final."""

MAX_ATTEMPTS = (1 << 14) - 1
"""Largest number of attempts per rollout; the keys of stores have no room for larger attempt numbers."""


class RetryPolicy(Record, frozen=True, kw_only=True):
    """The limits of a rollout: how often it may fail, how often it may lose its worker, and the time per attempt.

    Attributes:
        max_attempts: Largest number of attempts that may end as ``failed`` or ``timeout``, which are due to the agent.
        max_losses: Largest number of attempts whose worker may go away. After one more loss the rollout is assumed to
            kill its workers, and fails. Attempts that a worker gives back do not count.
        timeout_s: Wall-clock seconds that the agent may take in one attempt; then the worker stops it. ``None`` for no
            limit.
        grace_s: Seconds that the worker has, in addition to ``timeout_s``, to start and to stop the agent. When both
            have passed since the claim, the store itself decides the attempt as ``timeout``.
        retry_on: The outcomes after which another attempt is made, within ``max_attempts``: ``failed``, ``timeout``.
    """

    max_attempts: Int64 = 1
    # Losses are nearly always the machine's fault, but after 21 lost workers the rollout is the
    # likelier cause.
    max_losses: Int64 = 20
    timeout_s: float | None = None
    grace_s: float = 0.0
    retry_on: tuple[AttemptStatus, ...] = ("failed", "timeout")


class Rollout(Record, frozen=True, kw_only=True):
    """One run of the agent on one task.

    Attributes:
        rollout_id: Sortable and unique; chosen by the caller, so that enqueueing twice is harmless.
        task: The agent's input; JSON.
        experiment: Name of the experiment, ``""`` for none.
        group_id: The task's identity, shared by the rollouts whose rewards are compared.
        mode: Whether the rollout trains, validates or tests.
        resources: Pinned versions by the resource's name; of other resources the rollout gets the newest version.
        retry: Attempts and time limit.
        hidden: Top-level keys of ``task`` that only reward emitters see, never the agent.
        metadata: Data of the caller, such as algorithm and step.
        status: The state of the rollout; ``succeeded``, ``failed`` and ``cancelled`` are final.
        attempts: Attempts started so far.
        failures: Attempts that ended as ``failed`` or ``timeout``.
        losses: Attempts whose worker went away, without those that a worker gave back.
        attempt_id: The running or deciding attempt.
        created_at: Unix seconds; 0.0 until the rollout is queued.
        started_at: Unix seconds of the first attempt's start; 0.0 until then.
        finished_at: Unix seconds of the end; 0.0 until then.
    """

    rollout_id: str
    task: Json
    experiment: str = ""
    group_id: str = ""
    mode: Mode = "train"
    resources: dict[str, str] = {}
    retry: RetryPolicy = RetryPolicy()
    hidden: tuple[str, ...] = ()
    metadata: dict[str, Json] = {}
    status: RolloutStatus = "queued"
    attempts: Int64 = 0
    failures: Int64 = 0
    losses: Int64 = 0
    attempt_id: str | None = None
    created_at: float = 0.0
    started_at: float = 0.0
    finished_at: float = 0.0
    schema_version: int = SCHEMA_VERSION

    @property
    def is_finished(self) -> bool:
        """True if the outcome is final."""
        return self.status in TERMINAL_ROLLOUT

    @property
    def visible_task(self) -> Json:
        """The task without its hidden keys, for the agent."""
        # A task that is a text or a list has no keys to hide.
        if not self.hidden or not _is_object(self.task):
            return self.task
        return {key: value for key, value in self.task.items() if key not in self.hidden}

    @property
    def for_agent(self) -> "Rollout":
        """A copy of this rollout for the agent, without the hidden keys of the task and without their names."""
        return msgspec.structs.replace(self, task=self.visible_task, hidden=())


class ErrorInfo(Record, frozen=True, kw_only=True):
    """An exception as data: the qualified name of its type, its message and its formatted traceback."""

    type: str
    message: str
    traceback: str = ""


# array_like: a record of five values without their names, stored with every attempt.
class Graded(Record, frozen=True, kw_only=True, array_like=True, gc=False):
    """A reward about a whole rollout, reduced to value, name and source, with the start and sequence of its span."""

    value: float | None
    name: str = ""
    source: RewardSource = "environment"
    start_ns: int = 0
    sequence: int = 0


class Tally(Record, frozen=True, kw_only=True, gc=False):
    """The sums of an attempt's spans, which the store updates as spans arrive.

    Attributes:
        calls: Number of model calls, including retries and failed calls, but without calls that were recorded late.
        prompt_tokens: Tokens of these calls' prompts: the number of token ids, or without ids the backend's count.
        response_tokens: Tokens of these calls' responses, counted in the same way.
        graded: The reward that counts under each name, by the rule of :func:`agl.episodes.score`, in order of time.
    """

    calls: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    graded: tuple[Graded, ...] = ()


# One object for all attempts, because omit_defaults compares with the default by identity.
NO_TALLY = Tally()
"""The tally of an attempt without spans; encoded records leave out this object."""


class Attempt(Record, frozen=True, kw_only=True):
    """One try at a rollout by one worker.

    Attributes:
        attempt_id: ``<rollout_id>.<number>``; assigned by the store at the claim.
        number: 1 for the first.
        worker: The worker that holds or held the attempt.
        claim_id: Id of the claim that opened the attempt, so that a repeated claim gets the same attempt.
        lease_until: Unix seconds at which the attempt is lost unless its lease is renewed.
        lease_s: Length of the lease at the last renewal, in seconds; 0.0 in records of older releases.
        tally: The sums of the attempt's spans. Attempts before a rollout's last one lack it if an older release wrote
            them.
    """

    attempt_id: str
    rollout_id: str
    number: Int64
    worker: str
    claim_id: str = ""
    status: AttemptStatus = "running"
    lease_until: float = 0.0
    lease_s: float = 0.0
    started_at: float = 0.0
    finished_at: float = 0.0
    error: ErrorInfo | None = None
    tally: Tally = NO_TALLY
    schema_version: int = SCHEMA_VERSION


class Claim(Record, frozen=True, kw_only=True):
    """A rollout to run, and the attempt that was opened for it."""

    rollout: Rollout
    attempt: Attempt


class Outcome(Record, frozen=True, kw_only=True):
    """The end of an attempt, with its last spans, which were not appended before; written in one transaction."""

    attempt_id: str
    status: AttemptStatus
    error: ErrorInfo | None = None
    spans: tuple[Span, ...] = ()


def _is_object(value: Json) -> TypeGuard[dict[str, Json]]:
    return isinstance(value, dict)
