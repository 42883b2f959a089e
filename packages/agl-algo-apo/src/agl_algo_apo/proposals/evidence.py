"""Evidence for a critic: failing runs, cut down to the calls that read the text under review, with their feedback.

The text under review stands once in the request, so where an agent's messages repeat it they only refer to it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from agl import semconv
from agl.contracts import AlgorithmContext, RolloutQuery
from agl.dialects import call_messages
from agl.episodes import Enclosing
from agl.errors import NotFoundError
from agl.schemas import Record, Resource, Rollout, Span
from agl.stores import all_spans
from agl_algo_apo.measurement.scores import Measured
from agl_algo_apo.texts.filled_templates import FilledTemplate, filled_template

MESSAGE_CHARS = 600
"""Most characters of one message that are shown, from its start and its end."""

RUN_CHARS = 4000
"""Most characters of one run's messages that are shown."""


class EvidenceRun(Record, frozen=True, kw_only=True):
    """One run as a critic may see it.

    Attributes:
        task: The task without its hidden keys, as JSON.
        measured: Its reward and feedback.
        lines: Its events, one a line.
    """

    task: str
    measured: Measured
    lines: tuple[str, ...] = ()

    def text(self, number: int) -> str:
        """Return the run as text, under a heading with its number and reward."""
        parts = [f"## Run {number}: reward {self.measured.reward:.2f}", f"Task: {self.task}"]
        if self.measured.status != "ok":
            parts.append(f"The run ended as: {self.measured.status}")
        if self.measured.feedback:
            parts.append(f"Feedback: {self.measured.feedback}")
        if self.lines:
            parts.append("What happened:\n" + _cut("\n".join(self.lines), RUN_CHARS))
        return "\n".join(parts)


def evidence_text(runs: Sequence[EvidenceRun]) -> str:
    """Return all runs as one text."""
    return "\n\n".join(["# Runs that fell short", *(run.text(i) for i, run in enumerate(runs, start=1))])


async def read_run(
    context: AlgorithmContext, measured: Measured, *, name: str, resource: Resource, agents: str = ""
) -> EvidenceRun:
    """Read a rollout from the store and return it as evidence about one resource.

    A rollout that is no longer in the store has its reward and feedback alone.

    Args:
        context: Has the store.
        measured: The rollout's outcome.
        name: The resource under review.
        resource: Its content in that rollout.
        agents: Regular expression over the names of the agents whose calls are shown; by default those whose messages
            hold the text, or all where none does.
    """
    try:
        rollout = (await context.store.rollouts(RolloutQuery(ids=(measured.rollout,))))[0]
        spans = await all_spans(context.store, measured.rollout)
    except NotFoundError:
        return EvidenceRun(task="", measured=measured)
    return EvidenceRun(task=_task(rollout), measured=measured, lines=tuple(_lines(spans, name, resource, agents)))


def _task(rollout: Rollout) -> str:
    task = rollout.visible_task
    return task if isinstance(task, str) else msgspec.json.encode(task).decode()


def _lines(spans: Sequence[Span], name: str, resource: Resource, agents: str) -> list[str]:
    enclosing = Enclosing(spans)
    prompt = filled_template(resource)
    calls = [span for span in spans if span.call is not None]
    if agents:
        ours = [span for span in calls if re.fullmatch(agents, enclosing.who(span).agent)]
    else:
        ours = [span for span in calls if prompt is not None and _reads(span, prompt)] or calls
    shown = {span.span_id for span in ours}
    lines: list[str] = []
    seen: set[str] = set()
    for span in spans:
        if span.span_id in shown:
            who = enclosing.who(span).agent
            told = [f"[{who}] {line}" if who else line for line in _messages(span, name, prompt)]
            lines += [line for line in told if line not in seen]
            seen.update(told)
        else:
            lines += _event(span)
    return lines


def _messages(span: Span, name: str, prompt: FilledTemplate | None) -> list[str]:
    assert span.call is not None  # noqa: S101 - chosen by the caller
    lines: list[str] = []
    for message in call_messages(span.call):
        content = message.get("content")
        text = content if isinstance(content, str) else msgspec.json.encode(content).decode() if content else ""
        if prompt is not None:
            text = prompt.replace(text, lambda found: _reference(name, found.values))
        if text:
            lines.append(f"{message.get('role', '')}: {_cut(text, MESSAGE_CHARS)}")
        for call in cast("list[dict[str, Any]]", message.get("tool_calls") or []):
            function: dict[str, Any] = call.get("function") or {}
            lines.append(f"tool call {function.get('name')}: {_cut(str(function.get('arguments')), MESSAGE_CHARS)}")
    return [*lines, f"model error: {span.call.error}"] if span.call.error else lines


def _event(span: Span) -> list[str]:
    """Return the lines of a span that is no model call: a tool's result, an observation, an object, an error."""
    attributes = span.attributes
    lines: list[str] = []
    if semconv.TOOL_RESULT in attributes:
        result = _cut(_as_text(attributes[semconv.TOOL_RESULT]), MESSAGE_CHARS)
        lines.append(f"tool {attributes.get(semconv.TOOL_NAME, '')} returned: {result}")
    for key, label in ((semconv.OBSERVATION_CONTENT, "observed"), (semconv.MESSAGE, "said"), (semconv.OBJECT, "made")):
        if key in attributes:
            lines.append(f"{label}: {_cut(_as_text(attributes[key]), MESSAGE_CHARS)}")
    if span.status == "error" and span.status_message:
        lines.append(f"error in {span.name}: {_cut(span.status_message, MESSAGE_CHARS)}")
    return lines


def _reads(span: Span, prompt: FilledTemplate) -> bool:
    assert span.call is not None  # noqa: S101 - chosen by the caller
    return any(prompt.search(_as_text(message.get("content"))) for message in call_messages(span.call))


def _reference(name: str, filled: Mapping[str, str]) -> str:
    """Return what stands in a message in place of the text under review."""
    values = "".join(f"; {key} = {value}" for key, value in filled.items())
    return f"(the text {name}{values})"


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters left out ...] {text[-half:]}"
