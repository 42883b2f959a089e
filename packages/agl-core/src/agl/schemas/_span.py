"""Spans: OpenTelemetry's fields, ids of rollout and attempt, and typed payloads for model calls and rewards."""

import math
import re
from typing import Any, Literal

import msgspec

from agl.schemas._base import SCHEMA_VERSION, Int64, Json, Record
from agl.schemas._call import ModelCall

RewardSource = Literal["evaluator", "environment", "agent", "hook", "human"]
"""The origin of a reward: a reward emitter, the environment, the agent with its own token, a hook, or a person."""

RewardScope = Literal["rollout", "turn", "span"]
"""The subject of a reward: the whole rollout, one turn of an agent, or one span."""

SpanStatus = Literal["unset", "ok", "error"]
"""The status of an operation, with OpenTelemetry's values."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class Reward(Record, frozen=True, kw_only=True):
    """A reward, its subject and its source.

    Attributes:
        value: The scalar; with ``None``, the experiment's setting for missing rewards decides whether the rollout
            trains.
        name: The reward's name, such as the emitter's; ``""`` for the unnamed one.
        dimensions: Named parts, such as ``{"syntax": 1.0, "goal": 0.0}``.
        weights: The weight of each part, if the value is the weighted sum of the parts; otherwise empty.
        scope: Whether the reward is about the whole rollout, one turn, or one span.
        span_id: The span that the reward is about; with scope ``turn``, the span of a model call. ``None`` with scope
            ``rollout``; with scope ``turn``, ``None`` stands for the newest model call before the reward.
        source: The reporter. The gateway sets ``agent`` for every reward that came with an attempt token.
        feedback: The reason for the reward as text, which prompt optimisers read.
        is_gold: Whether the reward only measures: it never trains, and a run compares it with the reward that does.
    """

    value: float | None
    name: str = ""
    dimensions: dict[str, float | None] = {}
    weights: dict[str, float] = {}
    scope: RewardScope = "rollout"
    span_id: str | None = None
    source: RewardSource = "environment"
    feedback: str = ""
    is_gold: bool = False

    @property
    def fault(self) -> str:
        """The first number that is not finite, such as ``"nan"`` or ``"inf as 'goal'"``; ``""`` if all are finite."""
        # JSON has no NaN and no infinity, and one of them in a group makes every advantage of the
        # group NaN.
        if self.value is not None and not math.isfinite(self.value):
            return str(self.value)
        wrong = (f"{part} as {name!r}" for name, part in self.dimensions.items() if part and not math.isfinite(part))
        return next(wrong, "")


class SpanEvent(Record, frozen=True, kw_only=True):
    """An event within a span; ``time_ns`` is in Unix nanoseconds."""

    name: str
    time_ns: Int64
    attributes: dict[str, Json] = {}


class Span(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One recorded operation of an attempt; unique by (rollout, attempt, span id).

    Attributes:
        span_id: 16 lower-case hex digits.
        trace_id: 32 lower-case hex digits. agl's own spans have one trace per attempt; spans of other programs keep
            their trace.
        parent_id: The enclosing span, ``None`` at the root.
        sequence: Position in the attempt, from 1; if it is 0, the store assigns the next one on append.
        name: ``"{operation} {model|agent|tool}"`` by the GenAI conventions.
        kind: OpenTelemetry's span kind in lower case.
        start_ns: Start in Unix nanoseconds.
        end_ns: End in Unix nanoseconds.
        status: OpenTelemetry's status.
        attributes: JSON values by name; the names are in :mod:`agl.semconv`.
        is_late: Whether the attempt was already decided when the span was appended; set by the store.
        call: The model call, on ``chat`` spans.
        reward: The reward, on reward spans.
    """

    rollout_id: str
    attempt_id: str
    span_id: str
    name: str
    trace_id: str = ""
    parent_id: str | None = None
    sequence: Int64 = 0
    kind: Literal["internal", "client", "server", "producer", "consumer"] = "internal"
    start_ns: Int64 = 0
    end_ns: Int64 = 0
    status: SpanStatus = "unset"
    status_message: str = ""
    attributes: dict[str, Any] = {}
    events: tuple[SpanEvent, ...] = ()
    is_late: bool = False
    call: ModelCall | None = None
    reward: Reward | None = None
    schema_version: int = SCHEMA_VERSION


def blob_digests(span: Span) -> list[str]:
    """The digests of the blobs that a span refers to, each once: of its placeholder runs and of all other inputs."""
    call = span.call
    if call is None or not (call.inputs or call.media):
        return []
    named = dict.fromkeys([*call.inputs, *(each.digest for each in call.media)])
    return [each for each in named if _DIGEST.fullmatch(each)]
