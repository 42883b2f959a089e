"""Exports rollouts as ATIF 1.8: one trajectory per rollout, which embeds its further conversations as sub-agents.

Each conversation is a trajectory, named after the agent that made its calls. If a conversation began within a tool
call, that tool's result refers to it. Fields that ATIF has no name for are in ``extra`` as ``agl``.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

import agl
from agl import semconv
from agl.contracts import Recording
from agl.schemas import Blob, Json, ModelCall, Span, Usage, unpack_floats, unpack_ids
from agl_data.export.about import call_about, rewards_about, rollout_about
from agl_data.export.conversations import (
    Conversation,
    Message,
    Turn,
    arguments_of,
    conversations_of,
    function_of,
    objects_in,
)
from agl_data.export.pictures import data_url, url_of
from agl_data.json_values import NO_NUMBERS, LineFile, are_numbers, without_empty
from agl_inspect.exports import Exported, ExportSetup, Losses, chat_tools

VERSION = "ATIF-v1.8"
_NO_CALLS = "rollouts without a model call that was answered: left out"
_SPANS = "spans of agents, nodes, tools and others: their names and results stay, their times and attributes do not"
_PATHS = "model calls within several agents, nodes or tools: only the nearest name stays"
_TOOLS = "model calls with other tools than their conversation's first call has: those of the first one stay"
_MEDIA = "parts of messages other than text and pictures of a known type that the store has: left out"
_RESULTS = "results of tools that no call before them asked for: without the call's id"
_NOT_TRAINED = "model calls that may not train, by their reject reason: without token ids"
_MISMATCH = "model calls with another number of log-probabilities than of tokens: without log-probabilities"

_SOURCES = {"system": "system", "developer": "system", "assistant": "agent"}
_WITH_IDS = frozenset({"", "missing_token_ids", "length_mismatch", "empty_response"})
_IMAGES = {"png": "image/png", "jpg": "image/jpeg", "jpeg": "image/jpeg", "gif": "image/gif", "webp": "image/webp"}
_COST = "agl.cost_usd"


class AtifWriter:
    """Writes rollouts as trajectories, one per line."""

    reads_blobs = True

    def __init__(self, *, setup: ExportSetup) -> None:
        self._losses, self._lines = setup.losses, LineFile(setup)

    def write(self, item: Exported) -> int:
        """Write a rollout and return 1; a rollout without an answered call is left out and gives 0."""
        rollout_id = item.recording.rollout.rollout_id
        found = conversations_of(item, self._losses)
        if not found:
            self._losses.add(_NO_CALLS, rollout_id)
            return 0
        self._lines.write(_Trajectories(item, found, self._losses).document(), rollout_id)
        return 1

    def close(self) -> None:
        """Do nothing: every rollout is already written."""


class _Trajectories:
    """Makes the trajectory of a rollout, with its sub-agents' trajectories embedded."""

    def __init__(self, item: Exported, found: list[Conversation], losses: Losses) -> None:
        self._item, self._losses = item, losses
        self._id = item.recording.rollout.rollout_id
        self._found = found
        self._callers = _callers(item.recording, found, self._id)

    def document(self) -> dict[str, Json]:
        """Return the first conversation's trajectory, with the trajectories of the others embedded."""
        first, *others = self._found
        calls = {turn.seen.span_id for each in self._found for turn in each.turns}
        rewards = rewards_about(self._item, calls, self._losses)
        about = {**rollout_about(self._item), **without_empty({"rewards": rewards})}
        others_made: list[Json] = [
            {"trajectory_id": f"{self._id}/{number}", **self._trajectory(each), "extra": {"agl": {}}}
            for number, each in enumerate(others, start=1)
        ]
        self._count_spans()
        return {
            "schema_version": VERSION,
            "session_id": self._id,
            "trajectory_id": self._id,
            **self._trajectory(first),
            **({"subagent_trajectories": others_made} if others_made else {}),
            "extra": {"agl": about},
        }

    def _trajectory(self, conversation: Conversation) -> dict[str, Json]:
        steps = _Steps(conversation, self._callers, self._item.blobs, self._lose)
        tools = chat_tools(conversation.turns[0].call)
        differ = sum(chat_tools(turn.call) != tools for turn in conversation.turns)
        self._lose(_TOOLS, differ)
        agent: dict[str, Json] = {"name": conversation.agent, "version": "unknown"}
        definitions = {"tool_definitions": tools} if tools else {}
        return {
            "schema_version": VERSION,
            "agent": {**agent, **definitions, "extra": {"exporter": f"agl-data {agl.__version__}"}},
            "steps": steps.made,
            "final_metrics": _totals(steps.made),
        }

    def _count_spans(self) -> None:
        calls = {turn.seen.span_id for each in self._found for turn in each.turns}
        others = [
            span
            for span in self._item.recording.spans
            if span.call is None and span.reward is None and span.name != semconv.ROOT_SPAN_NAME
        ]
        self._lose(_SPANS, len(others))
        self._lose(_PATHS, sum(len(call.path) > 1 for call in self._item.episode.transitions if call.span_id in calls))

    def _lose(self, what: str, count: int = 1) -> None:
        self._losses.add(what, self._id, count)


class _Steps:
    """Makes the steps of a conversation."""

    def __init__(
        self, conversation: Conversation, callers: Mapping[str, list[str]], blobs: Mapping[str, Blob], lose: Any
    ) -> None:
        self._callers, self._blobs, self._lose = callers, blobs, lose
        self.made: list[dict[str, Any]] = []
        for turn in conversation.turns:
            for message in turn.before:
                self._add_given(message)
            self._add_call(turn)

    def _add_given(self, message: Message) -> None:
        role = str(message.get("role"))
        if role in ("tool", "function"):
            self._add_result(message)
            return
        source = _SOURCES.get(role, "user")
        copied = {**self._answer(message), "is_copied_context": True} if source == "agent" else {}
        step = {"source": source, "message": self._content(message.get("content")), **copied}
        self._add(step, without_empty({"role": role if role in ("developer",) else "", "name": message.get("name")}))

    def _add_call(self, turn: Turn) -> None:
        call, span = turn.call, turn.span
        step = {
            **({"timestamp": _iso(span.start_ns)} if span.start_ns else {}),
            "source": "agent",
            **({"model_name": call.model} if call.model else {}),
            "message": self._content(turn.answer.get("content")),
            **self._answer(turn.answer),
            "metrics": self._metrics(turn),
            "llm_call_count": 1,
        }
        self._add(step, {"agl": call_about(span, turn.seen)})

    def _add(self, step: dict[str, Any], extra: dict[str, Json]) -> None:
        self.made.append({"step_id": len(self.made) + 1, **step, **({"extra": extra} if extra else {})})

    def _answer(self, message: Message) -> dict[str, Any]:
        """Return the reasoning and the tool calls of an assistant message, without empty fields."""
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        calls = [self._tool_call(call) for call in objects_in(message.get("tool_calls"))]
        return without_empty(
            {"reasoning_content": reasoning if isinstance(reasoning, str) else "", "tool_calls": calls}
        )

    def _tool_call(self, call: Message) -> dict[str, Any]:
        function, arguments = function_of(call), arguments_of(call)
        made: dict[str, Any] = {
            "tool_call_id": str(call.get("id") or ""),
            "function_name": str(function.get("name") or ""),
            "arguments": arguments if isinstance(arguments, dict) else {},
        }
        return made if isinstance(arguments, dict) else {**made, "extra": {"arguments": function.get("arguments")}}

    def _add_result(self, message: Message) -> None:
        call_id = str(message.get("tool_call_id") or "")
        last: dict[str, Any] = self.made[-1] if self.made else {}
        if last.get("source") != "agent":
            last = {"source": "system", "message": ""}
            self._add(last, {})
            last = self.made[-1]
        known = {call["tool_call_id"] for call in last.get("tool_calls", ())}
        self._lose(_RESULTS, int(call_id not in known))
        named = {"source_call_id": call_id} if call_id in known else {"extra": {"tool_call_id": call_id}}
        below = [{"trajectory_id": each} for each in self._callers.get(call_id, ())] if call_id in known else []
        result = {**named, "content": self._content(message.get("content"))}
        last.setdefault("observation", {"results": []})["results"].append(
            {**result, **({"subagent_trajectory_ref": below} if below else {})}
        )

    def _content(self, content: Any) -> Json:
        if not isinstance(content, list):
            return content if isinstance(content, str) else ""
        parts = [self._part(part) for part in objects_in(cast("Any", content))]
        self._lose(_MEDIA, parts.count(None))
        kept = [part for part in parts if part is not None]
        return kept if kept else ""

    def _part(self, part: Message) -> dict[str, Json] | None:
        if isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        url = url_of(part)
        url = data_url(self._blobs[url]) if url in self._blobs else url
        kind = _image_type(url)
        return {"type": "image", "source": {"media_type": kind, "path": url}} if kind else None

    def _metrics(self, turn: Turn) -> dict[str, Json]:
        call = turn.call
        cost = turn.span.attributes.get(_COST)
        metrics = {**_counts(call), **({"cost_usd": cost} if isinstance(cost, int | float) else {})}
        if turn.seen.reject not in _WITH_IDS:
            self._lose(_NOT_TRAINED)
            return metrics
        logprobs, answer = unpack_floats(call.logprobs), unpack_ids(call.response_ids)
        if len(logprobs) != len(answer) and logprobs:
            self._lose(_MISMATCH)
            logprobs = []
        if not are_numbers(logprobs):
            self._lose(NO_NUMBERS)
            logprobs = []
        ids = {"prompt_token_ids": unpack_ids(call.prompt_ids), "completion_token_ids": answer, "logprobs": logprobs}
        return {**metrics, **without_empty(ids)}


def _callers(recording: Recording, found: list[Conversation], own: str) -> dict[str, list[str]]:
    """Return the trajectory ids of the conversations that began within a tool call, by the id of the tool call."""
    spans = {(span.attempt_id, span.span_id): span for span in recording.spans}
    callers: dict[str, list[str]] = {}
    for number, conversation in enumerate(found):
        call_id = _tool_around(conversation.turns[0].span, spans) if number else ""
        if call_id:
            callers.setdefault(call_id, []).append(f"{own}/{number}")
    return callers


def _tool_around(span: Span, spans: Mapping[tuple[str, str], Span]) -> str:
    """Return the id of the innermost tool call that encloses a span; ``""`` if no tool call does."""
    seen: set[str] = set()
    above: Span | None = span
    while above is not None and above.span_id not in seen:
        seen.add(above.span_id)
        call_id = above.attributes.get(semconv.TOOL_CALL_ID)
        if isinstance(call_id, str) and call_id:
            return call_id
        framework = above.attributes.get(semconv.FRAMEWORK_SPAN_ID)
        above = spans.get((above.attempt_id, str(framework))) or spans.get((above.attempt_id, above.parent_id or ""))
    return ""


def _counts(call: ModelCall) -> dict[str, Json]:
    """Return a call's token counts as the backend reported them, or else counted from its token ids."""
    response: Any = call.response
    usage = Usage.read(cast("Message", response).get("usage") if isinstance(response, dict) else None)
    asked, answered = usage.prompt or call.prompt_len, usage.answer or call.response_len
    counts = {"prompt_tokens": asked, "completion_tokens": answered, "cached_tokens": usage.cached}
    return {name: count for name, count in counts.items() if count}


def _totals(steps: list[dict[str, Any]]) -> dict[str, Json]:
    names = ("prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd")
    found = {name: [step["metrics"][name] for step in steps if name in step.get("metrics", {})] for name in names}
    return {**{f"total_{name}": sum(values) for name, values in found.items() if values}, "total_steps": len(steps)}


def _image_type(url: str) -> str:
    """Return an image's media type, found from its URL; ``""`` for types that ATIF does not know."""
    if url.startswith("data:"):
        kind = url[5:60].partition(";")[0]
        return kind if kind in _IMAGES.values() else ""
    return _IMAGES.get(url.partition("?")[0].rpartition(".")[2].lower(), "")


def _iso(unix_ns: int) -> str:
    seconds, rest = divmod(unix_ns, 1_000_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"
