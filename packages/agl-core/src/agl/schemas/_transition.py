"""Transitions and rows, on which algorithms train, and the reasons for which a call is left out."""

from typing import Literal

import msgspec

from agl.schemas._base import Record
from agl.schemas._call import LIMITS
from agl.schemas._media import MediaSpan
from agl.schemas._rollout import Attempt, Rollout
from agl.schemas._span import Reward

RejectReason = Literal[
    "",
    "error",  # the backend answered with an error, or not at all
    "incomplete",  # the answer was cut: cancelled stream, lost connection
    "superseded",  # the client retried the request; the last complete answer counts
    "missing_token_ids",
    "length_mismatch",  # log-probabilities and response ids differ in number
    "empty_response",
    "non_token_input",  # images or audio that the algorithm cannot train on
    "not_selected",  # the agent filter, or a policy that is not in training
    "late",  # recorded after the attempt was decided
    "unseen_calls",  # other calls of the attempt bypassed the gateway: see Episode.unseen
    "unattributed",  # it lies in no framework's span, and the experiment leaves such rollouts out
    "unreadable",  # a span of the attempt is damaged in the store, and might be a call or a reward
    "not_final",  # belongs to an attempt that did not decide the rollout
    "no_reward",
    "too_long",
    "stale",
]
"""The reason why a model call is in no row; ``""`` for a call that is in a row."""


class Transition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One model call as ``(input_t, output_t, reward_t)``.

    Attributes:
        span_id: The model call's span.
        agent: The agent, node or role that made the call; ``""`` if unknown.
        path: Names of the enclosing agents, nodes and tools, outermost first.
        turn: Position among this agent's calls in the attempt, from 0.
        branch: Index of the call's branch in the call forest.
        start: Index in the branch's row at which ``response_ids`` begins; -1 for a rejected call.
        prompt_ids: Packed int32, [P].
        response_ids: Packed int32, [R].
        logprobs: Packed float32, [R].
        reward: The call's own reward (turn or span scope); ``None`` if it has none.
        reject: The reason why the call is in no row; ``""`` if it is in a row.
        detail: Explanation of the reject reason, or description of the drift that started a new branch.
        finish_reason: The backend's word for the end of the answer, such as ``stop``; ``""`` if it gave none.
        media: The placeholder runs of the prompt's pictures.
        processor: The processor that made these runs; ``""`` without pictures.
    """

    rollout_id: str
    attempt_id: str
    span_id: str
    agent: str = ""
    path: tuple[str, ...] = ()
    turn: int = 0
    branch: int = -1
    start: int = -1
    policy: str = ""
    model_version: str = ""
    prompt_ids: bytes = b""
    response_ids: bytes = b""
    logprobs: bytes = b""
    reward: float | None = None
    reject: RejectReason = ""
    detail: str = ""
    temperature: float = 1.0
    is_distribution_changed: bool = False
    finish_reason: str = ""
    media: tuple[MediaSpan, ...] = ()
    processor: str = ""

    @property
    def is_truncated(self) -> bool:
        """True if the answer was cut at a token limit, by the finish reason of any backend."""
        return self.finish_reason.lower() in LIMITS


class Segment(Record, frozen=True, kw_only=True):
    """The tokens ``[start, stop)`` of a row, which one call sampled."""

    start: int
    stop: int
    span_id: str
    agent: str = ""
    model_version: str = ""


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One branch of an attempt's call forest, ready for a trainer. T is the number of tokens.

    Attributes:
        ids: Packed int32, [T].
        mask: uint8, [T]: 1 where a policy in training sampled the token, else 0.
        logprobs: Packed float32, [T]: behaviour log-probabilities, 0.0 where the mask is 0.
        advantages: Packed float32, [T]; empty until credit was assigned and normalised.
        segments: The sampled parts in order. They do not overlap, and together they cover the tokens with mask 1.
        media: The placeholder runs of pictures, with offsets in the row; they lie where the mask is 0.
        processor: The processor that made these runs; ``""`` without pictures.
    """

    rollout_id: str
    attempt_id: str
    group_id: str
    branch: int
    ids: bytes
    mask: bytes
    logprobs: bytes
    advantages: bytes = b""
    segments: tuple[Segment, ...] = ()
    media: tuple[MediaSpan, ...] = ()
    processor: str = ""


class LooseCall(Record, frozen=True, kw_only=True):
    """A model call that was only reported by a framework, or only recorded.

    Attributes:
        span_id: The framework's ``chat`` span, or the recorded call's span.
        client: The class or library that called, and the host, as far as they are known.
        is_foreign: True for a call to a server that serves no policy, such as the model behind a tool. Such a call is
            reported, but does not exclude the rollout from training.
    """

    span_id: str
    agent: str = ""
    model: str = ""
    client: str = ""
    is_foreign: bool = False


class Episode(Record, frozen=True, kw_only=True):
    """A finished rollout as an algorithm sees it.

    Attributes:
        rollout: The rollout with its whole task, including hidden keys.
        attempt: The deciding attempt; ``None`` if no attempt was ever started.
        reward: The scalar that trains; ``None`` if there is none.
        rewards: Every recorded reward of the deciding attempt, in order, except the attempt's own late ones.
        transitions: Every recorded call, in order of time. Rejected calls have their reject reason.
        rows: One row per branch.
        unseen: Calls that a framework or a client's tracer reported but that were not recorded, so the record is
            incomplete.
        unattributed: Recorded calls outside every span of a framework, in an attempt where a framework has spans.
        unreadable: Number of the attempt's spans that are damaged in the store; with any, it has no reward.
    """

    rollout: Rollout
    attempt: Attempt | None
    reward: float | None
    rewards: tuple[Reward, ...] = ()
    transitions: tuple[Transition, ...] = ()
    rows: tuple[Row, ...] = ()
    unseen: tuple[LooseCall, ...] = ()
    unattributed: tuple[LooseCall, ...] = ()
    unreadable: int = 0


class CallCredit(Record, frozen=True, kw_only=True):
    """The credit that a credit assignment gives to one call.

    Attributes:
        span_id: The model call's span.
        value: The call's return, or its advantage if ``is_advantage``.
        baseline: Baseline key. An estimator compares the calls that share it, and counts each rollout once.
        is_advantage: Whether the value is already an advantage, which an estimator must not normalise again.
        role: Name of the role that made the call, for estimators that compare a role with itself in other tasks; ``""``
            if the credit knows no roles.
    """

    span_id: str
    value: float
    baseline: str
    is_advantage: bool = False
    role: str = ""
