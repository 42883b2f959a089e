"""Rollouts and attempts: one run of the agent on one task, and the tries that it takes."""

from typing import Literal, TypeGuard

import msgspec

from agl.schemas._base import SCHEMA_VERSION, Json, Record
from agl.schemas._span import RewardSource, Span

Mode = Literal["train", "val", "test"]
"""The purpose of a rollout: to train, to choose between versions, or to measure a result that nothing learns from."""

RolloutStatus = Literal["queued", "running", "succeeded", "failed", "cancelled"]
"""The state of a rollout; the last three are final."""

AttemptStatus = Literal["running", "succeeded", "failed", "timeout", "lost", "cancelled"]
"""The state of one try: ``lost`` when its worker went away, ``timeout`` when it was stopped for taking too long."""

TERMINAL_ROLLOUT: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})
"""The statuses of a rollout that are final."""

TERMINAL_ATTEMPT: frozenset[str] = frozenset({"succeeded", "failed", "timeout", "lost", "cancelled"})
"""The statuses of an attempt that are final."""


class RetryPolicy(Record, frozen=True, kw_only=True):
    """The limits of trying a rollout: how often it may fail and lose its worker, and the time of each attempt.

    Attributes:
        max_attempts: Attempts at most that end as ``failed`` or ``timeout``, the agent's own doing.
        max_losses: Attempts at most whose worker goes away before they end. With one more the rollout counts as one
            that kills its workers, and fails. Attempts that a worker gives back count nowhere.
        timeout_s: Wall-clock seconds that the agent may take in one attempt, after which its worker stops it;
            ``None`` for no limit.
        grace_s: Seconds beyond ``timeout_s`` from the claim until the store itself decides the attempt: the time that
            the worker has to start the agent and to stop it.
        retry_on: The outcomes, ``failed`` and ``timeout``, that lead to another attempt while ``max_attempts`` lasts.
    """

    max_attempts: int = 1
    # Losses are the machine's fault nearly always; a rollout that kills 21 workers in a row is the
    # likelier cause.
    max_losses: int = 20
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
        resources: Pinned resource versions by name; a name that is absent means the newest.
        retry: Attempts and time limit.
        hidden: Top-level keys of ``task`` that only reward emitters see, never the agent.
        metadata: Anything that the caller wants to find again, such as algorithm and step.
        status: Queued, running, or terminal; terminal is final.
        attempts: Attempts started so far.
        failures: Attempts that ended as ``failed`` or ``timeout``.
        losses: Attempts whose worker went away; those that it gave back are not counted.
        attempt_id: The running or deciding attempt.
        created_at: Unix seconds, like the two times that follow; 0.0 until the event happens.
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
    attempts: int = 0
    failures: int = 0
    losses: int = 0
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
        """The task as an agent may see it, without its hidden keys."""
        # A task that is a text or a list has no keys to hide.
        if not self.hidden or not _is_object(self.task):
            return self.task
        return {key: value for key, value in self.task.items() if key not in self.hidden}

    @property
    def for_agent(self) -> "Rollout":
        """This rollout as an agent may see it: without the hidden keys and their names."""
        return msgspec.structs.replace(self, task=self.visible_task, hidden=())


class ErrorInfo(Record, frozen=True, kw_only=True):
    """An exception as data: its type's qualified name, its message, its formatted traceback."""

    type: str
    message: str
    traceback: str = ""


# array_like: a record of five values without their names, stored with every attempt.
class Graded(Record, frozen=True, kw_only=True, array_like=True, gc=False):
    """A reward about a whole rollout, without its parts and words, and its place among the attempt's spans."""

    value: float | None
    name: str = ""
    source: RewardSource = "environment"
    start_ns: int = 0
    sequence: int = 0


class Tally(Record, frozen=True, kw_only=True, gc=False):
    """The sums of an attempt's spans, which the store keeps while they arrive.

    Attributes:
        calls: Model calls, failed ones and retries included, and the tokens of their prompts and responses: those of
            the ids where there are some, else as the backend counted them. Calls recorded late do not count.
        graded: The reward that counts under each name, in order of time, by the rule of :func:`agl.episodes.score`.
    """

    calls: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    graded: tuple[Graded, ...] = ()


# One object for all attempts, for omit_defaults compares with the default by identity where it can.
NO_TALLY = Tally()
"""The tally of an attempt without spans; records leave out this very object."""


class Attempt(Record, frozen=True, kw_only=True):
    """One try at a rollout by one worker.

    Attributes:
        attempt_id: ``<rollout_id>.<number>``; assigned by the store at the claim.
        number: 1 for the first.
        worker: The worker that holds or held it.
        claim_id: The claim request that made it, so that a repeated request gets the same attempt.
        lease_until: Unix seconds at which the attempt counts as lost unless it is renewed.
        lease_s: Length of the lease at the last renewal, in seconds; 0.0 in records of older releases.
        tally: The sums of its spans; of attempts before the last one only in stores that no older release wrote.
    """

    attempt_id: str
    rollout_id: str
    number: int
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
    """A rollout to run and the attempt that was opened for it."""

    rollout: Rollout
    attempt: Attempt


class Outcome(Record, frozen=True, kw_only=True):
    """The end of an attempt, with its spans that are not appended yet; written in one transaction."""

    attempt_id: str
    status: AttemptStatus
    error: ErrorInfo | None = None
    spans: tuple[Span, ...] = ()


def _is_object(value: Json) -> TypeGuard[dict[str, Json]]:
    return isinstance(value, dict)
