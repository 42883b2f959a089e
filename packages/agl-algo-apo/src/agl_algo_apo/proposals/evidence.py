"""Evidence for a critic: failing runs, reduced to the calls that read the text under review, with their feedback.

The text under review is in the request once, so an agent's messages that repeat it only refer to it.

Failures that other algorithms paid for suggest tasks to try first, and give the critic more runs. They are evidence and
never a score, because other weights may have been live when they ran.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agl import semconv
from agl.contracts import AlgorithmContext, RolloutQuery
from agl.dialects import call_messages
from agl.episodes import Enclosing
from agl.errors import NotFoundError
from agl.schemas import Record, Resource, Rollout, Span, to_json
from agl.stores import all_spans
from agl_algo_apo.measurement.evaluation import feedback_of
from agl_algo_apo.measurement.scores import Measured
from agl_algo_apo.search.progress import SearchProgress
from agl_algo_apo.texts.demonstrations import as_text
from agl_algo_apo.texts.filled_templates import FilledTemplate, filled_template

MESSAGE_CHARS = 600
"""The most characters of one message that are shown, from its start and its end."""

RUN_CHARS = 4000
"""The most characters of one run's messages that are shown."""


class EvidenceRun(Record, frozen=True, kw_only=True):
    """One run as a critic may see it.

    Attributes:
        task: The task without its hidden keys, as JSON.
        measured: The run's reward and feedback.
        lines: The run's events, one per line.
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
    """Return the runs as one text for a critic's request."""
    return "\n\n".join(["# Runs that fell short", *(run.text(i) for i, run in enumerate(runs, start=1))])


async def read_run(
    context: AlgorithmContext, measured: Measured, *, name: str, resource: Resource, agents: str = ""
) -> EvidenceRun:
    """Read a rollout from the store and return it as evidence about one resource.

    A rollout that is no longer in the store only has its reward and feedback.

    Args:
        context: Holds the store.
        measured: The rollout's outcome.
        name: The resource under review.
        resource: The resource's content in that rollout.
        agents: Regular expression for the names of the agents whose calls are shown; by default the agents whose
            messages contain the text, or all agents if there are none.
    """
    if (recorded := await recorded_run(context, measured.rollout)) is None:
        return EvidenceRun(task="", measured=measured)
    rollout, spans = recorded
    lines = tuple(_lines(spans, name, resource, agents))
    return EvidenceRun(task=as_text(rollout.visible_task), measured=measured, lines=lines)


async def recorded_run(context: AlgorithmContext, rollout_id: str) -> tuple[Rollout, Sequence[Span]] | None:
    """Return a rollout with its spans; ``None`` if it is no longer in the store."""
    try:
        rollout = (await context.store.rollouts(RolloutQuery(ids=(rollout_id,))))[0]
        return rollout, await all_spans(context.store, rollout_id)
    except NotFoundError:
        return None


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
            texts = [f"[{who}] {line}" if who else line for line in _messages(span, name, prompt)]
            lines += [line for line in texts if line not in seen]
            seen.update(texts)
        else:
            lines += _event(span)
    return lines


def _messages(span: Span, name: str, prompt: FilledTemplate | None) -> list[str]:
    assert span.call is not None  # noqa: S101 - chosen by the caller
    lines: list[str] = []
    for message in call_messages(span.call):
        text = as_text(message.get("content") or "")
        if prompt is not None:
            text = prompt.replace(text, lambda found: _reference(name, found.values))
        if text:
            lines.append(f"{message.get('role', '')}: {_cut(text, MESSAGE_CHARS)}")
        for call in cast("list[dict[str, Any]]", message.get("tool_calls") or []):
            function: dict[str, Any] = call.get("function") or {}
            lines.append(f"tool call {function.get('name')}: {_cut(str(function.get('arguments')), MESSAGE_CHARS)}")
    return [*lines, f"model error: {span.call.error}"] if span.call.error else lines


def _event(span: Span) -> list[str]:
    """Return the lines for a span other than a model call: a tool's result, an observation, an object, an error."""
    attributes = span.attributes
    lines: list[str] = []
    if semconv.TOOL_RESULT in attributes:
        result = _cut(as_text(attributes[semconv.TOOL_RESULT]), MESSAGE_CHARS)
        lines.append(f"tool {attributes.get(semconv.TOOL_NAME, '')} returned: {result}")
    for key, label in ((semconv.OBSERVATION_CONTENT, "observed"), (semconv.MESSAGE, "said"), (semconv.OBJECT, "made")):
        if key in attributes:
            lines.append(f"{label}: {_cut(as_text(attributes[key]), MESSAGE_CHARS)}")
    if span.status == "error" and span.status_message:
        lines.append(f"error in {span.name}: {_cut(span.status_message, MESSAGE_CHARS)}")
    return lines


def _reads(span: Span, prompt: FilledTemplate) -> bool:
    assert span.call is not None  # noqa: S101 - chosen by the caller
    return any(prompt.search(as_text(message.get("content"))) for message in call_messages(span.call))


def _reference(name: str, filled: Mapping[str, str]) -> str:
    """Return the words that stand for the text under review where a message repeats it."""
    values = "".join(f"; {key} = {value}" for key, value in filled.items())
    return f"(the text {name}{values})"


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters left out ...] {text[-half:]}"


async def read_failures(context: AlgorithmContext, progress: SearchProgress, *, perfect_score: float) -> None:
    """Add to ``progress.shared`` the failures from the sources' new steps that ran with the live texts.

    Only rollouts with the texts that are live now count (staleness 0). If algorithms run at the same time, this waits
    for a source's next step.
    """
    if not context.sources:
        return
    recorded = await context.recorded(after=progress.shared_steps, max_age=0)
    progress.shared_steps = dict(recorded.steps)
    positions = {to_json(task): position for position, task in enumerate(context.train)}
    for episode in recorded.episodes:
        position = positions.get(to_json(episode.rollout.task))
        if position is None or episode.reward is None:
            continue
        progress.shared.pop(position, None)  # the newest rollout of a task counts, also where it succeeded
        if episode.reward < perfect_score:
            progress.shared[position] = Measured(
                reward=episode.reward, rollout=episode.rollout.rollout_id, feedback=feedback_of(episode)
            )


def live_failures(progress: SearchProgress, candidate: str) -> Mapping[int, Measured]:
    """Return other algorithms' failures with the candidate's texts; empty for all but the best candidate."""
    return progress.shared if candidate == progress.best else {}
