"""Encodes a complete answer as the event stream of its dialect, with each text in one piece."""

from collections.abc import Iterator
from typing import Any

from agl.schemas import Dialect, to_json

Event = dict[str, Any]


def stream_of(dialect: Dialect, answer: Event) -> bytes:
    """Encode a complete answer of ``dialect`` as server-sent events."""
    if dialect in ("messages", "responses"):
        events = _messages(answer) if dialect == "messages" else _responses(answer)
        return b"".join(b"event: %s\ndata: %s\n\n" % (event["type"].encode(), to_json(event)) for event in events)
    events = _chat(answer) if dialect == "chat" else iter((answer,))
    return b"".join(b"data: %s\n\n" % to_json(event) for event in events) + b"data: [DONE]\n\n"


def _chat(answer: Event) -> Iterator[Event]:
    head = {key: answer[key] for key in ("id", "created", "model") if key in answer}
    head["object"] = "chat.completion.chunk"
    for choice in answer.get("choices", ()):
        message = {**choice.get("message", {})}
        if message.get("tool_calls"):
            message["tool_calls"] = [{"index": at, **call} for at, call in enumerate(message["tool_calls"])]
        index = choice.get("index", 0)
        yield {**head, "choices": [{"index": index, "delta": message, "finish_reason": None}]}
        yield {**head, "choices": [{"index": index, "delta": {}, "finish_reason": choice.get("finish_reason")}]}
    if answer.get("usage"):
        yield {**head, "choices": [], "usage": answer["usage"]}


def _messages(answer: Event) -> Iterator[Event]:
    yield {"type": "message_start", "message": {**answer, "content": [], "stop_reason": None}}
    for index, block in enumerate(answer.get("content", ())):
        empty, delta = _block(block)
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ending = {key: answer.get(key) for key in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": ending, "usage": answer.get("usage") or {"output_tokens": 0}}
    yield {"type": "message_stop"}


def _block(block: Event) -> tuple[Event, Event]:
    """Split a content block into its initial form and the one delta that completes it."""
    match block.get("type"):
        case "tool_use":
            text = to_json(block.get("input", {})).decode()
            return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": text}
        case "thinking":
            return {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block.get("thinking", "")}
        case _:
            return {**block, "text": ""}, {"type": "text_delta", "text": block.get("text", "")}


def _responses(answer: Event) -> Iterator[Event]:
    started: Event = {**answer, "status": "in_progress", "output": []}
    events: list[Event] = [{"type": "response.created", "response": started}]
    for index, item in enumerate(answer.get("output", ())):
        events.extend({"output_index": index, **event} for event in _item(item))
    ending = "incomplete" if answer.get("status") == "incomplete" else "completed"
    events.append({"type": f"response.{ending}", "response": answer})
    yield from ({"sequence_number": number, **event} for number, event in enumerate(events))


def _item(item: Event) -> Iterator[Event]:
    whole = {"item_id": item.get("id", "")}
    if item.get("type") == "function_call":
        arguments = item.get("arguments", "")
        yield {"type": "response.output_item.added", "item": {**item, "arguments": "", "status": "in_progress"}}
        yield {"type": "response.function_call_arguments.delta", "delta": arguments, **whole}
        yield {
            "type": "response.function_call_arguments.done",
            "arguments": arguments,
            "name": item.get("name"),
            **whole,
        }
    elif item.get("type") == "message":
        yield {"type": "response.output_item.added", "item": {**item, "content": [], "status": "in_progress"}}
        for index, part in enumerate(item.get("content", ())):
            yield from ({"content_index": index, **whole, **event} for event in _part(part))
    else:
        yield {"type": "response.output_item.added", "item": item}
    yield {"type": "response.output_item.done", "item": item}


def _part(part: Event) -> Iterator[Event]:
    name, field = ("refusal", "refusal") if part.get("type") == "refusal" else ("output_text", "text")
    text = part.get(field, "")
    yield {"type": "response.content_part.added", "part": {**part, field: ""}}
    yield {"type": f"response.{name}.delta", "delta": text, **({"logprobs": []} if field == "text" else {})}
    yield {"type": f"response.{name}.done", field: text, **({"logprobs": []} if field == "text" else {})}
    yield {"type": "response.content_part.done", "part": part}
