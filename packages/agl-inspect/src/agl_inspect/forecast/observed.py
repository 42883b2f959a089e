"""Reduces a recorded rollout to the facts that a forecast needs, so that many long rollouts fit in memory."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from agl import semconv
from agl.contracts import Recording
from agl.dialects import call_messages
from agl.schemas import Attempt, Episode, Json, ModelCall, Record, Rollout, Span, Transition, to_json
from agl_inspect.records.names import error_of
from agl_inspect.rollouts.conversations import objects
from agl_inspect.rollouts.explanations import tokens_of

_SECOND_NS = 1e9


class ToolUse(Record, frozen=True, kw_only=True):
    """The number of calls of one tool in a rollout, and how many of them failed with an error."""

    calls: int = 0
    failed: int = 0


class Observed(Record, frozen=True, kw_only=True):
    """The facts of one rollout, as one algorithm would train on it.

    Attributes:
        rollout_id: The rollout's id.
        group_id: The id of the rollout's group, which is the id of its task.
        batch: The algorithm and step for which the rollout was collected; rollouts of one batch ran concurrently.
        status: ``succeeded`` or ``failed``.
        error: The error of a failed rollout, ``""`` if it succeeded.
        is_timeout: Whether an attempt was stopped at its time limit.
        attempts: Number of attempts.
        started_at: Start of the first attempt in Unix seconds.
        finished_at: End of the rollout in Unix seconds.
        seconds: Duration of all attempts together.
        deciding_s: Duration of the deciding attempt.
        model_s: Seconds of the deciding attempt in model calls.
        tool_s: Seconds of the deciding attempt in tools, outside of model calls.
        calls: Number of recorded model calls, without repeated and late calls and those of other attempts.
        prompt_tokens: Tokens of all prompts together.
        response_tokens: Tokens of all answers together.
        rows: Number of training rows.
        row_tokens: Tokens of all rows together.
        trained_tokens: Tokens of the rows that train.
        context: Tokens of the longest row, or of the longest prompt with its answer if that is longer.
        reward: The recorded reward.
        trains: The reward that trains, ``None`` if training leaves the rollout out.
        left_out: The reason why training leaves the rollout out, ``""`` if the rollout trains.
        rejects: Number of calls that are in no row, by reject reason.
        cut: Number of calls whose answer was cut at a limit of tokens.
        drifted: Number of calls that begin a new row because of drift.
        restarted: Number of calls that repeat an earlier answer of the rollout and yet begin a new row.
        retried: Number of calls that the client repeated.
        agents: Number of calls by the agent's name, ``""`` for calls without an agent.
        answers: Digest of the texts of all answers.
        words: Number of words in all answers.
        is_greedy: Whether every answer was sampled at temperature 0.
        has_tools: Whether a request offered tools.
        asks_tools: Whether an answer called a tool.
        tools: The use of each tool that ran, by the tool's name.
        leaked: Hidden keys of the task whose value appears in the first prompt.
        chance: Hidden keys for which the value of another task appears in the first prompt.
        unseen: Number of calls to a policy that were seen but not recorded.
    """

    rollout_id: str
    group_id: str
    batch: str = ""
    status: str = "succeeded"
    error: str = ""
    is_timeout: bool = False
    attempts: int = 1
    started_at: float = 0.0
    finished_at: float = 0.0
    seconds: float = 0.0
    deciding_s: float = 0.0
    model_s: float = 0.0
    tool_s: float = 0.0
    calls: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    rows: int = 0
    row_tokens: int = 0
    trained_tokens: int = 0
    context: int = 0
    reward: float | None = None
    trains: float | None = None
    left_out: str = ""
    rejects: dict[str, int] = {}
    cut: int = 0
    drifted: int = 0
    restarted: int = 0
    retried: int = 0
    agents: dict[str, int] = {}
    answers: str = ""
    words: int = 0
    is_greedy: bool = False
    has_tools: bool = False
    asks_tools: bool = False
    tools: dict[str, ToolUse] = {}
    leaked: tuple[str, ...] = ()
    chance: tuple[str, ...] = ()
    unseen: int = 0


def observe(
    recording: Recording, episode: Episode, *, trains: float | None, left_out: str, other: Json = None
) -> Observed:
    """Reduce a recording and its episode to facts.

    Args:
        recording: The rollout with the spans of its deciding attempt.
        episode: The calls and rows that the algorithm would train on.
        trains: The reward that trains, ``None`` if training leaves the rollout out.
        left_out: The reason why training leaves the rollout out.
        other: The task of another rollout, whose hidden values can be in this rollout's prompts only by chance.
    """
    rollout, attempts = recording.rollout, recording.attempts
    spans = {span.span_id: span for span in recording.spans}
    made = [call for call in episode.transitions if call.reject not in ("superseded", "not_final", "late")]
    calls = [_Call(call, span, span.call) for call in made if (span := spans[call.span_id]).call is not None]
    sizes = [tokens_of(call.span) for call in calls]
    rows = [len(row.ids) // 4 for row in episode.rows]
    model_s, tool_s = _parts(recording.spans)
    seconds = {
        one.attempt_id: max(0.0, ended_at(recording, one) - one.started_at) for one in attempts if one.finished_at
    }
    texts = [call.answer for call in calls]
    first = calls[0].prompt if calls else ""
    return Observed(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        batch=f"{rollout.metadata.get('algorithm', '')} {rollout.metadata.get('step', '')}",
        status=rollout.status,
        error="" if rollout.status == "succeeded" else error_of(rollout, episode.attempt),
        is_timeout=any(attempt.status == "timeout" for attempt in attempts),
        attempts=len(attempts),
        started_at=min((attempt.started_at for attempt in attempts), default=0.0),
        finished_at=rollout.finished_at,
        seconds=sum(seconds.values()),
        deciding_s=seconds.get(rollout.attempt_id or "", 0.0),
        model_s=model_s,
        tool_s=tool_s,
        calls=len(made),
        prompt_tokens=sum(prompt for prompt, _ in sizes),
        response_tokens=sum(response for _, response in sizes),
        rows=len(rows),
        row_tokens=sum(rows),
        trained_tokens=sum(row.mask.count(1) for row in episode.rows),
        context=max([*rows, *(prompt + response for prompt, response in sizes)], default=0),
        reward=episode.reward,
        trains=trains,
        left_out=left_out,
        rejects=dict(Counter(call.reject for call in episode.transitions if call.reject)),
        cut=sum(call.is_truncated for call in made),
        drifted=sum(bool(call.detail) for call in made if not call.reject),
        restarted=_restarted(calls),
        retried=sum(call.record.retry_count > 0 for call in calls)
        + sum(call.reject == "superseded" for call in episode.transitions),
        agents=dict(Counter(call.agent for call in made)),
        answers=hashlib.blake2b("\0".join(texts).encode("utf-8", "replace"), digest_size=16).hexdigest(),
        words=sum(len(text.split()) for text in texts),
        is_greedy=bool(calls) and all(call.record.sampling.temperature == 0 for call in calls),
        has_tools=any(call.offers_tools for call in calls),
        asks_tools=any(call.asks_tools for call in calls),
        tools=_tools(recording.spans),
        leaked=tuple(_standing(rollout, rollout.task, first)),
        chance=tuple(_standing(rollout, other, first)),
        unseen=sum(not call.is_foreign for call in episode.unseen),
    )


def ended_at(recording: Recording, attempt: Attempt) -> float:
    """Return the time, in Unix seconds, at which an attempt freed its slot for the next rollout.

    The deciding attempt frees its slot at the end of its last span, because the next rollout starts while the outcome
    is still being stored.
    """
    if attempt.attempt_id != recording.rollout.attempt_id:
        return attempt.finished_at
    ends = [span.end_ns / _SECOND_NS for span in recording.spans if not span.is_late and span.end_ns]
    return min(attempt.finished_at, max(ends, default=attempt.finished_at))


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the total length of the intervals, counting overlaps only once."""
    total, until = 0.0, 0.0
    for begin, end in sorted(intervals):
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total


def _parts(spans: Sequence[Span]) -> tuple[float, float]:
    """Return the seconds spent in model calls, and the seconds spent in tools outside of model calls."""
    models = [(span.start_ns, span.end_ns) for span in spans if span.call is not None and span.start_ns]
    tools = [(span.start_ns, span.end_ns) for span in spans if _tool_of(span) and span.start_ns]
    model_ns = covered(models)
    return model_ns / _SECOND_NS, (covered([*models, *tools]) - model_ns) / _SECOND_NS


def _tool_of(span: Span) -> str:
    if span.attributes.get(semconv.OPERATION) != semconv.OP_EXECUTE_TOOL:
        return ""
    return str(span.attributes.get(semconv.TOOL_NAME) or span.name)


def _tools(spans: Sequence[Span]) -> dict[str, ToolUse]:
    calls = Counter(name for span in spans if (name := _tool_of(span)))
    failed = Counter(name for span in spans if span.status == "error" and (name := _tool_of(span)))
    return {name: ToolUse(calls=count, failed=failed[name]) for name, count in calls.items()}


class _Call:
    """A model call with its messages, from which the facts about texts are computed."""

    def __init__(self, transition: Transition, span: Span, record: ModelCall) -> None:
        self.transition, self.span, self.record = transition, span, record
        messages: list[dict[str, Any]] = call_messages(record)
        is_answered = record.response is not None and bool(messages) and messages[-1].get("role") == "assistant"
        self._given, self._answered = (messages[:-1], messages[-1]) if is_answered else (messages, dict[str, Any]())

    @property
    def answer(self) -> str:
        """The text and the tool calls of the answer, without the ids of tool calls, because these always differ."""
        return " ".join(_texts(self._answered)).strip()

    @property
    def prompt(self) -> str:
        """The part of the prompt that the agent wrote: all texts except the answers of models."""
        return "\n".join(text for one in self._given if one.get("role") != "assistant" for text in _texts(one))

    @property
    def repeated(self) -> set[str]:
        """The earlier answers of models that the prompt contains."""
        return {" ".join(_texts(one)).strip() for one in self._given if one.get("role") == "assistant"} - {""}

    @property
    def offers_tools(self) -> bool:
        """True if the request offers tools."""
        request: Any = self.record.request
        return isinstance(request, dict) and bool(cast("dict[str, Any]", request).get("tools"))

    @property
    def asks_tools(self) -> bool:
        """True if the answer calls a tool."""
        return bool(self._answered.get("tool_calls"))


def _restarted(calls: Sequence[_Call]) -> int:
    """Count the calls that begin a new row although their prompt repeats an earlier answer of the rollout."""
    rows, answers, count = set[int](), set[str](), 0
    for call in calls:
        if not call.transition.reject:
            count += call.transition.branch not in rows and bool(answers & call.repeated)
            rows.add(call.transition.branch)
        answers.add(call.answer)
    return count


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    content: Any = message.get("content")
    yield content if isinstance(content, str) else to_json(content).decode() if content else ""
    for call in objects(message.get("tool_calls")):
        yield to_json(call.get("function") or call.get("custom")).decode()


def _standing(rollout: Rollout, task: Json, prompt: str) -> Iterator[str]:
    """Yield the hidden keys of ``task`` whose value is in the prompt, but not in the rollout's visible task."""
    visible = to_json(rollout.visible_task).decode()
    own, given = _keys(rollout.task), _keys(task)
    for key in rollout.hidden:
        value = _plain(given.get(key))
        is_own = given is not own and value == _plain(own.get(key))  # an equal value says nothing about chance
        if value and not is_own and _has(prompt, value) and not _has(visible, value):
            yield key


def _keys(task: Json) -> dict[str, Any]:
    return cast("dict[str, Any]", task) if isinstance(task, dict) else {}


def _plain(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else to_json(value).decode()
    return " ".join(text.split())


def _has(text: str, value: str) -> bool:
    """Return true if the text contains the value as whole words."""
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", " ".join(text.split())) is not None
