"""Reads the Responses API: typed items of a body, or events of a stream.

vLLM gives ids as raw messages when ``enable_response_messages`` is set. Its log-probabilities come with text parts
only, so an answer with tool calls or with marker tokens has fewer of them than ids; the call's ``ids_missing`` reports
it. Other servers may add ``prompt_token_ids``, ``token_ids`` and ``logprobs`` (a list of numbers) for the whole answer.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec

from agl.dialects._chat import error_text
from agl.dialects._exchange import Answer, Choice
from agl.dialects._foreign import as_dict, as_list, as_text, dicts_in, is_list, version_in
from agl.dialects._sse import BODY, objects

# Each of these events repeats the whole response, so the items before it need not be put together.
_FINAL = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")
_DROPPED = (
    "input_messages",
    "output_messages",
    "prompt_token_ids",
    "prompt_media",
    "processor",
    "token_ids",
    "logprobs",
    "instructions",
    "tools",
)


def read_body(data: bytes) -> Answer:
    """Parse the answer in a plain body; raises :class:`msgspec.DecodeError` if the body is not JSON."""
    return _answer(BODY.decode(data), is_finished=True)


def read_stream(data: bytes) -> Answer:
    """Parse the answer in a stream: the final event's response, or the items that arrived if the stream was cut."""
    first: dict[str, Any] | None = None
    final: dict[str, Any] | None = None
    error = ""
    for event in objects(data):
        if isinstance(event.get("response"), dict):
            first = first or event["response"]
            final = event["response"] if event.get("type") in _FINAL else final
        if not error and (event.get("type") == "error" or "error" in event):
            error = error_text(event.get("error") or event.get("message"))
    if final is not None:
        return _answer(final, is_finished=True)
    if first is None:
        return Answer(error=error)
    # Kept for people: a cut answer is rejected, and they want to see how far it came.
    partial = {**first, "status": "in_progress", "output": _items(objects(data))}
    answer = _answer(partial, is_finished=False)
    return msgspec.structs.replace(answer, error=error or answer.error)


def _answer(body: dict[str, Any], *, is_finished: bool) -> Answer:
    version = version_in(body)
    error = error_text(body.get("error"))
    if not is_list(body.get("output")):
        return Answer(model_version=version, error=error)
    logprobs: list[float | None] = []
    output = [_without_logprobs(item, logprobs) for item in as_list(body["output"])]
    reason = as_dict(body.get("incomplete_details")).get("reason")
    choice = Choice(
        index=0,
        response={**{key: value for key, value in body.items() if key not in _DROPPED}, "output": output},
        finish_reason=str(reason or body.get("status") or ""),
        prompt_ids=_tokens(body.get("input_messages"), body.get("prompt_token_ids")),
        response_ids=_tokens(body.get("output_messages"), body.get("token_ids")),
        logprobs=as_list(body.get("logprobs")) or logprobs or None,
        is_finished=is_finished,
    )
    media = {key: body.get(key) for key in ("prompt_media", "processor")}
    return Answer(choices=(choice,), model_version=version, error=error, **media)


def _without_logprobs(item: Any, logprobs: list[float | None]) -> Any:
    entry = as_dict(item)
    if not is_list(entry.get("content")):
        return item
    return {**entry, "content": [_part(part, logprobs) for part in as_list(entry["content"])]}


def _part(part: Any, logprobs: list[float | None]) -> Any:
    entry = as_dict(part)
    if "logprobs" not in entry:
        return part
    logprobs.extend(_value(token) for token in as_list(entry["logprobs"]))
    return {key: value for key, value in entry.items() if key != "logprobs"}


def _value(token: Any) -> float | None:
    value = as_dict(token).get("logprob")
    return float(value) if isinstance(value, int | float) else None


def _tokens(messages: Any, plain: Any) -> list[int] | None:
    if not is_list(messages):
        return as_list(plain) if is_list(plain) else None
    # vLLM lists the raw messages of every turn of its built-in tools; together they are what the
    # model read, or wrote.
    lists = [as_list(item["tokens"]) for item in dicts_in(messages) if "tokens" in item]
    return [number for tokens in lists for number in tokens] if lists else None


def _items(events: Iterable[dict[str, Any]]) -> list[Any]:
    """The output items of a stream that ended early; an unfinished item is built from its deltas."""
    items: dict[int, Any] = {}
    # Joined at the end: adding the deltas one by one may copy the text each time.
    deltas: defaultdict[int, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        index, kind = event.get("output_index"), event.get("type")
        if not isinstance(index, int):
            continue
        if kind in ("response.output_item.added", "response.output_item.done"):
            items[index] = event.get("item")
            deltas.pop(index, None)
        elif isinstance(event.get("delta"), str) and isinstance(items.get(index), dict):
            deltas[index][str(kind)].append(event["delta"])
    for index, grown in deltas.items():
        for kind, parts in grown.items():
            _grow(items[index], kind, "".join(parts))
    return [items[index] for index in sorted(items)]


def _grow(item: dict[str, Any], kind: str, delta: str) -> None:
    if kind == "response.function_call_arguments.delta":
        item["arguments"] = as_text(item.get("arguments")) + delta
    elif kind == "response.output_text.delta":
        content = dicts_in(item.get("content")) or [{"type": "output_text", "text": ""}]
        content[-1]["text"] = as_text(content[-1].get("text")) + delta
        item["content"] = content
