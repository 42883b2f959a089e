"""Reads OpenAI's fine-tuning format: JSON lines, each a conversation with ``messages`` and optionally ``tools``.

Every assistant message becomes a model call, whose request is all messages before it. An assistant message with
``weight`` 0 is excluded from training: it becomes no call, and only appears in later requests.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agl.errors import DatasetError
from agl.schemas import Json, ModelCall
from agl_data.importing.runs import CHANGED_TEXT, IDS_MISSING, Run
from agl_data.importing.source import Line, read_lines
from agl_data.importing.values import as_dict, as_list, as_text, dicts_in

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_READ = frozenset({"messages", "tools", "model", "agent", "parallel_tool_calls"})


def fits(record: Json) -> bool:
    """Return whether a record is a conversation."""
    return isinstance(as_dict(record).get("messages"), list)


def read(path: Path) -> Iterator[Run]:
    """Read a file's conversations; raises :class:`DatasetError` for a line that is not a conversation."""
    for line in read_lines(path):
        yield _run(line)


def _run(line: Line) -> Run:
    record = as_dict(line.value)
    messages = _checked(line.place, record)
    run = Run("", place=line.place, fields=record)
    run.prompt = next((message.get("content") for message in messages if message["role"] == "user"), None)
    agent = as_text(record.get("agent"))
    if agent:
        run.add_agent("agent", agent)
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and message.get("weight") != 0:
            run.add_call(f"call {index}", _call(record, messages, index), parent="agent" if agent else "")
        elif message["role"] == "tool":
            _add_tool(run, messages, index, parent="agent" if agent else "")
    if not run.calls:
        raise DatasetError(
            f"{line.place} has no message of the assistant to learn from; remove the line, or use it as a task"
        )
    run.unread = tuple(sorted(record.keys() - _READ))
    run.lost[CHANGED_TEXT] += int(line.is_changed)
    return run


def _checked(place: str, record: dict[str, Any]) -> list[dict[str, Any]]:
    given = as_list(record.get("messages"))
    messages = dicts_in(given)
    if not messages or len(messages) != len(given):
        raise DatasetError(f"{place} has no list of messages; write one object with messages a line")
    for number, message in enumerate(messages, start=1):
        if as_text(message.get("role")) not in _ROLES:
            raise DatasetError(
                f"{place}: message {number} has the role {message.get('role')!r}; use one of "
                f"{', '.join(sorted(_ROLES))}"
            )
        if not isinstance(message.get("content"), str | list | None):
            raise DatasetError(
                f"{place}: the content of message {number} is neither a text nor a list of parts; make it one"
            )
    return messages


def _call(record: dict[str, Any], messages: list[dict[str, Any]], index: int) -> ModelCall:
    model, tools = as_text(record.get("model")), as_list(record.get("tools"))
    message = {name: value for name, value in messages[index].items() if name != "weight"}
    request: dict[str, Json] = {"model": model, "messages": messages[:index], **({"tools": tools} if tools else {})}
    return ModelCall(
        request_id=f"line-{index}",
        dialect="chat",
        model=model,
        request=request,
        response={"choices": [{"index": 0, "message": message}]},
        ids_missing=IDS_MISSING,
    )


def _add_tool(run: Run, messages: list[dict[str, Any]], index: int, *, parent: str) -> None:
    message = messages[index]
    call_id = as_text(message.get("tool_call_id"))
    calls = (call for earlier in messages[:index] for call in dicts_in(earlier.get("tool_calls")))
    function = as_dict(next((call.get("function") for call in calls if call_id and call.get("id") == call_id), None))
    name = as_text(function.get("name")) or as_text(message.get("name"))
    run.add_tool(
        f"tool {index}",
        name,
        parent=parent,
        call_id=call_id,
        arguments=function.get("arguments"),
        result=message.get("content"),
    )
