"""Reads session logs of Codex, ``~/.codex/sessions/**/rollout-*.jsonl``: one file is one run.

A line is an object with ``timestamp``, ``type`` and ``payload``. The conversation consists of items of the Responses
API, and a ``token_count`` follows each answer of the model. A compaction replaces the conversation so far. Each
sub-agent has its own log, which names the thread that started it. The log does not have the tool definitions.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agl import semconv
from agl.errors import DatasetError
from agl.schemas import ErrorInfo, Json, ModelCall
from agl_data.importing.runs import CHANGED_TEXT, IDS_MISSING, Run
from agl_data.importing.source import read_lines
from agl_data.importing.values import as_dict, as_list, as_text, dicts_in, ns_of, text_of

MAIN = "codex"
_NO_TOOLS = "calls without the definitions of their tools, which the log leaves out"
_SEALED = "answers with encrypted reasoning, which only its provider reads"
_KINDS = ("session_meta", "response_item", "event_msg", "turn_context", "compacted")
_TOOLS = ("function_call", "custom_tool_call", "local_shell_call")
_SAMPLED = (*_TOOLS, "reasoning", "web_search_call", "image_generation_call", "tool_search_call")
_INJECTED = ("<environment_context", "<user_instructions", "# AGENTS.md", "<permissions", "<turn_aborted", "<skills")


def fits(record: Json) -> bool:
    """Return whether a record is a line of a session."""
    fields = as_dict(record)
    return fields.get("type") in _KINDS and isinstance(fields.get("payload"), dict)


def read(path: Path) -> Iterator[Run]:
    """Read a session as one run; yields nothing for a log without model calls."""
    session = _Session(path)
    if session.run.calls:
        yield session.run


class _Session:
    """Follows the conversation line by line, and makes a call of each complete answer."""

    def __init__(self, path: Path) -> None:
        self.run = Run("", place=str(path), grows=True)
        self._name, self._model, self._instructions = MAIN, "", ""
        self._input: list[Json] = []
        self._pending: list[dict[str, Any]] = []
        self._waiting: list[dict[str, Any]] = []
        self._open: dict[str, tuple[dict[str, Any], int]] = {}
        self._asked_ns = self._answered_ns = self._first_ns = 0
        lines = [line for line in read_lines(path)]
        self.run.lost[CHANGED_TEXT] += sum(line.is_changed for line in lines)
        self._is_counted = any(_usage(as_dict(line.value)) for line in lines)
        for line in lines:
            self._take(line.place, as_dict(line.value))
        self._answer({})
        about = {semconv.CONVERSATION_ID: self.run.key}
        self.run.add_agent("agent", self._name, start_ns=self._first_ns, end_ns=self._answered_ns, attributes=about)

    def _take(self, place: str, line: dict[str, Any]) -> None:
        payload, at_ns = as_dict(line.get("payload")), ns_of(line.get("timestamp"))
        self._first_ns = self._first_ns or at_ns
        match line.get("type"):
            case "session_meta":
                self._begin(payload)
            case "turn_context":
                self._model = as_text(payload.get("model")) or self._model
            case "response_item":
                self._item(payload, at_ns)
            case "compacted":
                self._answer({})
                history = dicts_in(payload.get("replacement_history"))
                summary: dict[str, Json] = {
                    "type": "message",
                    "role": "user",
                    "content": as_text(payload.get("message")),
                }
                self._input = list(history or [summary])
            case "event_msg":
                self._event(line, payload)
            case None:
                raise DatasetError(f"{place} has no type; name the log as Codex wrote it")
            case _:
                pass

    def _begin(self, meta: dict[str, Any]) -> None:
        """Read id, instructions and agent from the first ``session_meta``.

        The log of a forked session repeats the ``session_meta`` of its origin, which is ignored.
        """
        if self.run.key:
            return
        self.run.key, self.run.fields = as_text(meta.get("id")), meta
        base = meta.get("base_instructions")
        self._instructions = as_text(as_dict(base).get("text")) or as_text(base) or as_text(meta.get("instructions"))
        spawned = as_dict(as_dict(as_dict(meta.get("source")).get("subagent")).get("thread_spawn"))
        role = as_text(spawned.get("agent_role")) or as_text(spawned.get("agent_nickname"))
        self._name = role or (f"{MAIN}-sub-agent" if spawned else MAIN)

    def _event(self, line: dict[str, Any], payload: dict[str, Any]) -> None:
        usage = _usage(line)
        if usage:
            self._answer(usage)
        elif payload.get("type") == "turn_aborted":
            self._answer({})
        elif payload.get("type") == "error":
            self.run.error = ErrorInfo(type="CodexError", message=as_text(payload.get("message"))[:2000])
        elif payload.get("type") == "task_complete":
            self.run.error = None

    def _item(self, item: dict[str, Any], at_ns: int) -> None:
        if item.get("type") in _SAMPLED or (item.get("type") == "message" and item.get("role") == "assistant"):
            if self._waiting and not self._is_counted:
                self._answer({})
            self._pending.append(item)
            self._answered_ns = max(self._answered_ns, at_ns)
            if item.get("type") in _TOOLS:
                self._open[as_text(item.get("call_id"))] = (item, at_ns)
            return
        is_output = as_text(item.get("type")).endswith("_output")
        if is_output:
            self._add_tool(item, at_ns)
        elif self._pending:
            self._answer({})
        if self._pending:
            self._waiting.append(item)
        else:
            self._input.append(item)
            self._asked_ns = at_ns or self._asked_ns
        if item.get("role") == "user" and self.run.prompt is None:
            text = text_of(item.get("content"))
            self.run.prompt = text if text and not text.startswith(_INJECTED) else None

    def _answer(self, usage: dict[str, Any]) -> None:
        """End the pending answer, if any: make it a call, and append it to the conversation."""
        output, waiting, self._pending, self._waiting = self._pending, self._waiting, [], []
        if output:
            self._add_call(output, usage)
            self._asked_ns = self._answered_ns
        self._input += [*output, *waiting]

    def _add_call(self, output: Sequence[dict[str, Any]], usage: dict[str, Any]) -> None:
        number = self.run.calls
        request: dict[str, Json] = {"model": self._model, "input": list(self._input)}
        if self._instructions:
            request["instructions"] = self._instructions
        response: dict[str, Json] = {"model": self._model, "output": list(output)}
        call = ModelCall(
            request_id=f"{self.run.key}/{number}",
            dialect="responses",
            model=self._model,
            request=request,
            response={**response, **({"usage": usage} if usage else {})},
            ids_missing=IDS_MISSING,
        )
        self.run.lost[_NO_TOOLS] += 1
        self.run.lost[_SEALED] += int(any(item.get("encrypted_content") for item in output))
        start_ns = min(self._asked_ns or self._answered_ns, self._answered_ns)
        self.run.add_call(f"call {number}", call, parent="agent", start_ns=start_ns, end_ns=self._answered_ns)

    def _add_tool(self, item: dict[str, Any], at_ns: int) -> None:
        call_id = as_text(item.get("call_id"))
        if call_id not in self._open:
            return
        call, start_ns = self._open.pop(call_id)
        output = item.get("output")
        name = as_text(call.get("name")) or ("shell" if call.get("type") == "local_shell_call" else "")
        arguments = next((call[key] for key in ("arguments", "input", "action") if key in call), None)
        self.run.add_tool(
            f"tool {call_id}",
            name,
            parent="agent",
            call_id=call_id,
            arguments=arguments,
            result=text_of(as_list(output)) if isinstance(output, list) else output,
            is_error=as_dict(output).get("success") is False,
            start_ns=min(start_ns, at_ns),
            end_ns=at_ns,
        )


def _usage(line: dict[str, Any]) -> dict[str, Any]:
    """Return the token usage of the last answer from a ``token_count`` line; empty for other lines."""
    payload = as_dict(line.get("payload"))
    is_count = line.get("type") == "event_msg" and payload.get("type") == "token_count"
    return as_dict(as_dict(payload.get("info")).get("last_token_usage")) if is_count else {}
