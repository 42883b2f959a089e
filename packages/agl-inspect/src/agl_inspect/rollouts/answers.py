"""Finds the recorded answers of a rollout's model calls, and encodes answers as the bytes that a client expects.

A replay sends a recorded answer again: as JSON, or as the event stream of its dialect, with each text as one delta.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeGuard

from agl.contracts import DIVERGED, REPLAY_VERSION, Store, fork_of
from agl.dialects import call_messages
from agl.episodes import Enclosing, chronological, is_answered
from agl.errors import AglError, NotFoundError
from agl.schemas import Dialect, Json, ModelCall, Record, Rollout, Span, to_json
from agl.stores import all_spans
from agl_inspect.rollouts.conversations import comparable

Event = dict[str, Any]
"""An event of a streamed answer, or a complete answer or part of one, as JSON."""


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
    """Split a content block into an empty block to start with and one delta that completes it."""
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


_NO_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


def asked(dialect: Dialect, request: Json) -> list[dict[str, Any]]:
    """Return the conversation in a request body, in a form in which conversations can be compared."""
    return comparable(call_messages(ModelCall(request_id="", dialect=dialect, model="", request=request)))


_OFFERED = ("tools", "response_format", "text")
"""The keys of a request's body, besides the conversation, with texts that may decide the answer."""


def key_of(dialect: Dialect, request: Json) -> bytes:
    """Return a key that is equal for requests of one dialect with the same conversation, tools and format."""
    offered = [request.get(key) for key in _OFFERED] if _is_object(request) else []
    return to_json([dialect, asked(dialect, request), offered])


_PASSING = frozenset({"metadata", "seed", "stream", "stream_options", "user"})
"""The keys of a request's body that do not change the distribution from which the answer is drawn."""


def whole_key_of(dialect: Dialect, request: Json) -> bytes:
    """Return a key that is equal for requests of one dialect whose answers are drawn from the same distribution.

    Compares the model and the sampling parameters too, which a gateway may change in training.
    """
    body = sorted((key, value) for key, value in request.items() if key not in _PASSING) if _is_object(request) else []
    return to_json([dialect, body])


def exchanges_of(calls: Sequence[ModelCall]) -> list[list[ModelCall]]:
    """Group calls that are choices of the same HTTP response; the groups are in order of their first calls."""
    found: dict[tuple[str, int], list[ModelCall]] = {}
    for call in calls:
        found.setdefault((call.request_id, call.retry_count), []).append(call)
    return list(found.values())


def answer_of(exchange: Sequence[ModelCall]) -> dict[str, Any] | None:
    """Return the response body of an exchange with all its choices; ``None`` if the body is not a JSON object."""
    first = exchange[0]
    if not _is_object(first.response):
        return None
    answer = dict(first.response)
    if len(exchange) > 1:
        answer["choices"] = [choice for call in exchange for choice in call.response.get("choices", ())]
    return answer


def encode_answer(dialect: Dialect, answer: dict[str, Any], *, is_streamed: bool) -> tuple[str, bytes]:
    """Return an answer's content type and body: JSON, or, if ``is_streamed``, the event stream of the dialect."""
    if is_streamed:
        return "text/event-stream", stream_of(dialect, answer)
    return "application/json", to_json(answer)


def text_answer(dialect: Dialect, request: Json, *, text: str, answer_id: str) -> dict[str, Any]:
    """Make a response body with ``text``, without tool calls, and with the requested number of choices.

    Raises :class:`ValueError` for embeddings.
    """
    body: dict[str, Any] = request if _is_object(request) else {}
    head: dict[str, Any] = {"id": answer_id, "model": body.get("model", "")}
    count = body.get("n")
    choices = range(count if isinstance(count, int) else 1)
    match dialect:
        case "chat":
            message = {"role": "assistant", "content": text}
            return _completion(head, "chat.completion", [{"message": message} for _ in choices])
        case "completions":
            return _completion(head, "text_completion", [{"text": text} for _ in choices])
        case "messages":
            usage = {"input_tokens": 0, "output_tokens": 0}
            ending = {"stop_reason": "end_turn", "stop_sequence": None, "usage": usage}
            return {
                **head,
                "type": "message",
                "role": "assistant",
                "content": [{"type": "text", "text": text}],
                **ending,
            }
        case "responses":
            return _response(head, body, text)
        case "embeddings":
            raise ValueError("an embedding is not a text")


def _completion(head: dict[str, Any], kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    numbered = [{"index": index, **choice, "finish_reason": "stop"} for index, choice in enumerate(choices)]
    return {**head, "object": kind, "created": 0, "choices": numbered, "usage": _NO_USAGE}


def _response(head: dict[str, Any], body: dict[str, Any], text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
    said: dict[str, Any] = {
        "type": "message",
        "id": f"msg_{head['id']}",
        "status": "completed",
        "role": "assistant",
        "content": [part],
    }
    usage = {
        "input_tokens": 0,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 0,
    }
    asked_for = {"tools": body.get("tools", []), "tool_choice": body.get("tool_choice", "auto")}
    kind = {"object": "response", "created_at": 0, "status": "completed", "parallel_tool_calls": True}
    return {**head, **kind, **asked_for, "output": [said], "usage": usage}


def _is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


class RecordedAnswer(Record, frozen=True, kw_only=True):
    """An answer of the recorded rollout.

    Attributes:
        agent: The agent that made the call.
        request: The request body; only its conversation is compared.
        response: The response body with all its choices.
        span_ids: The ids of the call's spans, one for each choice.
    """

    agent: str
    dialect: Dialect
    request: Json
    response: Json
    span_ids: tuple[str, ...] = ()


def recorded_answers(spans: Sequence[Span]) -> tuple[RecordedAnswer, ...]:
    """Return the complete answers of one attempt in order of time; of a retried request, only the last answer."""
    timeline = chronological(spans)
    enclosing = Enclosing(timeline.spans)
    calls = {id(span.call): span for span in timeline.spans if span.call and is_answered(span.call)}
    kept: dict[str, list[ModelCall]] = {}
    for exchange in exchanges_of([span.call for span in calls.values() if span.call]):
        kept[exchange[0].request_id or calls[id(exchange[0])].span_id] = exchange
    return tuple(
        RecordedAnswer(
            agent=enclosing.who(calls[id(exchange[0])]).agent,
            dialect=exchange[0].dialect,
            request=exchange[0].request,
            response=answer,
            span_ids=tuple(calls[id(call)].span_id for call in exchange if id(call) in calls),
        )
        for exchange in kept.values()
        if exchange[0].dialect != "embeddings" and (answer := answer_of(exchange)) is not None
    )


class AnswerCounts(Record, frozen=True, kw_only=True):
    """Counts of a rollout's calls by the origin of their answers.

    Attributes:
        replayed: Calls that got a recorded answer, or one that was made up for the replay.
        live: Calls that a model answered.
        refused: Calls that were refused because they diverge from the recording.
    """

    replayed: int = 0
    live: int = 0
    refused: int = 0


def answer_counts(model_versions: Iterable[str]) -> AnswerCounts:
    """Count calls by the origin of their answers, given the model versions that answered them."""
    versions = list(model_versions)
    refused = versions.count(DIVERGED)
    replayed = sum(version.startswith(REPLAY_VERSION) for version in versions) - refused
    return AnswerCounts(replayed=replayed, live=len(versions) - replayed - refused, refused=refused)


async def fork_origin(store: Store, rollout: Rollout) -> str:
    """Describe the recorded rollout and the call from which a fork continues; ``""`` if the rollout is not a fork."""
    try:
        plan = fork_of(rollout)
    except AglError:  # the user's own metadata has the same key
        return ""
    if plan is None:
        return ""
    try:
        calls = recorded_answers(await all_spans(store, plan.rollout_id))
    except NotFoundError:
        return f"{plan.rollout_id}, which is no longer recorded"
    for number, call in enumerate(calls, start=1):
        if plan.span_id in call.span_ids:
            return f"{plan.rollout_id} from call {number}{f' by {call.agent}' if call.agent else ''} on"
    return f"{plan.rollout_id} from a call on that is no longer recorded"
