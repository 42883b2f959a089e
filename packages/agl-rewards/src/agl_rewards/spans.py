"""Gives intermediate rewards for events: tools, steps and exceptions show how single turns went.

The events, each with its weight:

- ``tool_ok`` and ``tool_error``: a tool succeeded, or failed;
- ``step_ok`` and ``step_error``: an operation, node or agent that ``steps`` names succeeded, or failed;
- ``exception``: an exception that was reported, or that ended another operation, node or agent. If it passes through
  several of these, only the innermost counts; for a failed model call, only the span around the call;
- ``retry``: a model call that the client had to repeat;
- ``repeat``: a tool called again with exactly the same arguments.

Hand-offs and interrupts are not failures: tracers report them under their own names. The turn of an event is found with
the core's rule for rewards about spans. Credits add the rewards up.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from agl import semconv
from agl.episodes import Enclosing, ScoreOptions, Timeline, call_rewards, chronological, is_answered
from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl.schemas import Reward, Rollout, Span
from agl.tracing import make_reward_span

WEIGHTS: Mapping[str, float] = {"tool_ok": 0.1, "tool_error": -0.1, "exception": -0.1}
"""The default weights."""

EVENTS = ("tool_ok", "tool_error", "step_ok", "step_error", "exception", "retry", "repeat")


class RewardedEvent(NamedTuple):
    """An event: its kind, which determines the weight, and the span in which it happened."""

    kind: str
    span: Span


class SpanRewards:
    """Rewards for events during a run, which the credits ``turn`` and ``role`` add to the final reward.

    Args:
        weights: Reward by event; see the module. Events without a weight earn nothing.
        steps: Regular expression that must match the whole name of an operation, node or agent to make it a step.
        scope: ``turn`` gives one reward per model call, for the events that the call caused; ``span`` gives one per
            event, for the event's own span; ``rollout`` gives one for the whole run.
        name: The rewards' name. With the scope ``span`` a number is appended, because only the last of several
            rewards with the same name would count.

    Raises:
        ConfigError: An event is unknown, the regular expression is invalid, or steps have a weight but ``steps`` is
            empty.
    """

    def __init__(
        self,
        *,
        weights: dict[str, float] | None = None,
        steps: str = "",
        scope: Literal["turn", "span", "rollout"] = "turn",
        name: str = "spans",
    ) -> None:
        self._weights = dict(WEIGHTS if weights is None else weights)
        self._steps = _step_pattern(self._weights, steps)
        if scope not in ("turn", "span", "rollout"):
            raise ConfigError(f"spans got scope = {scope!r}; write 'turn', 'span' or 'rollout'")
        self._make: Callable[[Timeline, Sequence[RewardedEvent]], list[Reward]] = {
            "turn": self._by_turn,
            "span": self._by_span,
            "rollout": self._by_rollout,
        }[scope]
        self._name = name

    def __call__(self, rollout: Rollout, spans: Sequence[Span]) -> list[Reward]:
        """Return the rewards of one attempt; with the scope ``rollout`` exactly one."""
        timeline = chronological([span for span in spans if not span.is_late])
        events = [event for event in find_events(timeline.spans, steps=self._steps) if event.kind in self._weights]
        return self._make(timeline, events)

    def _by_span(self, timeline: Timeline, events: Sequence[RewardedEvent]) -> list[Reward]:
        return [
            Reward(
                value=self._weights[kind],
                name=f"{self._name}.{number}",
                dimensions={kind: self._weights[kind]},
                scope="span",
                span_id=span.span_id,
                source="evaluator",
                feedback=_described(kind, span),
            )
            for number, (kind, span) in enumerate(events, start=1)
        ]

    def _by_turn(self, timeline: Timeline, events: Sequence[RewardedEvent]) -> list[Reward]:
        """Return one reward per model call that caused events, by the core's rule for rewards about spans."""
        calls = [span for span in timeline.spans if span.call is not None and is_answered(span.call)]
        enclosing = Enclosing(timeline.spans)
        found: dict[str, dict[str, float | None]] = {call.span_id: {} for call in calls}
        # One kind after another, so that a call's reward can say how much each kind gave it.
        for kind in dict.fromkeys(event.kind for event in events):
            about = self._by_span(timeline, [event for event in events if event.kind == kind])
            made = [make_reward_span("", "", reward) for reward in about]
            known = chronological([*timeline.spans, *made])
            for call, value in call_rewards(known, calls, enclosing=enclosing, options=ScoreOptions()).items():
                found[call][kind] = value
        return [self._turn(call, parts) for call, parts in found.items() if parts]

    def _turn(self, call: str, parts: dict[str, float | None]) -> Reward:
        return Reward(
            value=sum(part or 0.0 for part in parts.values()),
            name=self._name,
            dimensions=parts,
            scope="turn",
            span_id=call,
            source="evaluator",
            feedback=", ".join(parts),
        )

    def _by_rollout(self, timeline: Timeline, events: Sequence[RewardedEvent]) -> list[Reward]:
        kinds = [event.kind for event in events]
        parts: dict[str, float | None] = {kind: weight * kinds.count(kind) for kind, weight in self._weights.items()}
        feedback = "; ".join(_described(*event) for event in events if self._weights[event.kind] < 0)
        total = sum(self._weights[kind] for kind in kinds)
        return [Reward(value=total, name=self._name, dimensions=parts, source="evaluator", feedback=feedback)]


def find_events(spans: Sequence[Span], *, steps: re.Pattern[str] | None = None) -> list[RewardedEvent]:
    """Return all events of an attempt, in order of time; operations, nodes and agents matching ``steps`` are steps."""
    timeline = chronological([span for span in spans if not span.is_late])
    failed_inside = _failed_inside(timeline)
    seen: set[tuple[str, str]] = set()
    return [
        RewardedEvent(kind, span)
        for span in timeline.spans
        for kind in _kinds(span, steps=steps, failed_inside=failed_inside, seen=seen)
    ]


def _failed_inside(timeline: Timeline) -> set[str]:
    """Return the failed spans whose failure came from a failed child, so that only the child counts.

    Failed model calls are not children in this sense: their failure is counted for the span around them. The failure
    is the child's if the span reports the child's error too. If one of the two reports no text, it is the child's if no
    model was called in the span after the child ended.
    """
    failed = {span.span_id: span for span in timeline.spans if span.status == "error"}
    newest = _newest_calls(timeline.spans)
    found: set[str] = set()
    for child in timeline.spans:
        parent = failed.get(child.parent_id or "")
        if child.status != "error" or child.call is not None or parent is None:
            continue
        error, said = child.status_message, _error_texts(parent)
        call = newest.get(parent.span_id)
        went_on = call is not None and timeline.start(call) > timeline.end(child)
        if any(error in text for text in said) if error and said else not went_on:
            found.add(parent.span_id)
    return found


def _newest_calls(spans: Sequence[Span]) -> dict[str, Span]:
    """Return, for each span, the newest model call inside it, at any depth."""
    around = {span.span_id: span.parent_id for span in spans}
    newest: dict[str, Span] = {}
    for call in reversed(spans):
        if call.call is None:
            continue
        framework = call.attributes.get(semconv.FRAMEWORK_SPAN_ID)
        outer = framework if isinstance(framework, str) and framework in around else call.parent_id
        # A span that was reached before has a newer call, and so has every span around it.
        while outer is not None and outer not in newest:
            newest[outer] = call
            outer = around.get(outer)
    return newest


def _error_texts(span: Span) -> list[str]:
    """Return all texts in which a span reports its error; a traceback among them also contains the causes."""
    texts = [value for event in span.events if event.name == "exception" for value in event.attributes.values()]
    return [text for text in (span.status_message, *texts) if isinstance(text, str) and text]


def _kinds(
    span: Span, *, steps: re.Pattern[str] | None, failed_inside: set[str], seen: set[tuple[str, str]]
) -> Iterator[str]:
    """Yield the kinds of events that a span represents; ``seen`` collects the tool calls so far."""
    has_failed = span.status == "error"
    if span.call is not None:
        if span.call.retry_count and is_answered(span.call):
            yield "retry"
    elif _operation(span) == semconv.OP_EXECUTE_TOOL:
        yield "tool_error" if has_failed else "tool_ok"
        call = (_text(span, semconv.TOOL_NAME) or span.name, str(span.attributes.get(semconv.TOOL_ARGUMENTS)))
        if call in seen and semconv.TOOL_ARGUMENTS in span.attributes:
            yield "repeat"
        seen.add(call)
    elif steps is not None and any(map(steps.fullmatch, _names(span))):
        yield "step_error" if has_failed else "step_ok"
    elif has_failed and span.name != semconv.ROOT_SPAN_NAME and span.span_id not in failed_inside:
        yield "exception"


def _names(span: Span) -> list[str]:
    """Return the names that ``steps`` is matched against for a span; empty for rewards and for the run's root span."""
    if span.reward is not None or span.name == semconv.ROOT_SPAN_NAME:
        return []
    named = [_text(span, key) for key in (semconv.AGENT_NAME, semconv.NODE, semconv.ROLE)]
    return [name for name in (*named, span.name) if name]


def _operation(span: Span) -> str:
    return _text(span, semconv.OPERATION)


def _text(span: Span, key: str) -> str:
    value = span.attributes.get(key)
    return value if isinstance(value, str) else ""


def _described(kind: str, span: Span) -> str:
    what = _text(span, semconv.TOOL_NAME) or span.name
    return f"{kind} {what}: {span.status_message}" if span.status_message else f"{kind} {what}"


def _step_pattern(weights: Mapping[str, float], steps: str) -> re.Pattern[str] | None:
    """Return the pattern of steps, or ``None`` without steps; raises :class:`ConfigError` for invalid settings."""
    unknown = sorted(set(weights) - set(EVENTS))
    if unknown:
        hint = did_you_mean(unknown[0], EVENTS, otherwise=f"use {', '.join(EVENTS)}")
        raise ConfigError(f"spans has weights for unknown events: {', '.join(unknown)}; {hint}")
    if not steps:
        if {"step_ok", "step_error"} & set(weights):
            raise ConfigError('spans has weights for steps but no steps; name them with steps = "execute|check"')
        return None
    try:
        return re.compile(steps)
    except re.error as error:
        raise ConfigError(
            f"spans got steps = {steps!r}, which is not a regular expression: {error}; correct it"
        ) from error
