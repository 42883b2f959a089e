"""Reads Anthropic messages: blocks of a body, or named events of a stream.

The format has no token ids. The readers also accept ``prompt_token_ids``, ``token_ids`` and ``logprobs`` (a list of
numbers) that a server adds to the body, or in a stream to ``message_start`` and ``message_delta``.
"""

from collections import defaultdict
from typing import Any

import msgspec

from agl.dialects._chat import error_text
from agl.dialects._exchange import Answer, Choice
from agl.dialects._foreign import as_dict, as_index, as_list, as_text, is_list, version_in
from agl.dialects._sse import BODY, objects

# They are kept packed in the record, so the JSON of the response goes without them.
_DROPPED = ("prompt_token_ids", "prompt_media", "processor", "token_ids", "logprobs")


def read_body(data: bytes) -> Answer:
    """Parse the answer in a plain body; raises :class:`msgspec.DecodeError` if the body is not JSON."""
    return _answer(BODY.decode(data), is_finished=True)


def _answer(body: dict[str, Any], *, is_finished: bool) -> Answer:
    version = version_in(body)
    if not is_list(body.get("content")):
        return Answer(model_version=version, error=error_text(body.get("error")))
    choice = Choice(
        index=0,
        response={key: value for key, value in body.items() if key not in _DROPPED},
        finish_reason=str(body.get("stop_reason") or ""),
        prompt_ids=_list(body.get("prompt_token_ids")),
        response_ids=_list(body.get("token_ids")),
        logprobs=_list(body.get("logprobs")),
        is_finished=is_finished,
    )
    media = {key: body.get(key) for key in ("prompt_media", "processor")}
    return Answer(choices=(choice,), model_version=version, error=error_text(body.get("error")), **media)


def _list(value: Any) -> list[Any] | None:
    return as_list(value) if is_list(value) else None


def read_stream(data: bytes) -> Answer:
    """Parse the part of an answer that has arrived in a stream."""
    message: dict[str, Any] = {}
    # By index: with parallel tools a server may interleave the deltas of several blocks.
    blocks: dict[int, dict[str, Any]] = {}
    # The texts of each block by field, joined at the end: adding them one by one may copy the text each time.
    texts: defaultdict[int, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    is_finished, error = False, ""
    for event in objects(data):
        match event.get("type"):
            case "message_start" if isinstance(event.get("message"), dict):
                message = dict(event["message"])
            case "content_block_start" if isinstance(event.get("content_block"), dict):
                index = as_index(event.get("index"))
                blocks[index] = dict(event["content_block"])
                texts.pop(index, None)
            case "content_block_delta" if isinstance(event.get("delta"), dict):
                index = as_index(event.get("index"))
                _grow(blocks.setdefault(index, {"type": "text", "text": ""}), event["delta"], texts[index])
            case "message_delta":
                _finish(message, event)
            case "message_stop":
                is_finished = True
            case "error":
                error = error_text(event.get("error"))
            case _:
                pass
    if not message:
        return Answer(error=error)
    for index, grown in texts.items():
        _join(blocks[index], grown)
    message["content"] = [blocks[index] for index in sorted(blocks)]
    answer = _answer(message, is_finished=is_finished)
    return msgspec.structs.replace(answer, error=error or answer.error)


def _grow(block: dict[str, Any], delta: dict[str, Any], texts: dict[str, list[str]]) -> None:
    match delta.get("type"):
        case "text_delta":
            texts["text"].append(as_text(delta.get("text")))
        case "input_json_delta":
            texts["input"].append(as_text(delta.get("partial_json")))
        case "thinking_delta":
            texts["thinking"].append(as_text(delta.get("thinking")))
        case "signature_delta":
            block["signature"] = delta.get("signature")
        case _:
            pass


def _join(block: dict[str, Any], texts: dict[str, list[str]]) -> None:
    for key, parts in texts.items():
        text = "".join(parts)
        block[key] = _json(text) if key == "input" else as_text(block.get(key)) + text


def _finish(message: dict[str, Any], event: dict[str, Any]) -> None:
    delta = as_dict(event.get("delta"))
    message.update({key: value for key, value in delta.items() if value is not None})
    # message_start counts the input tokens, message_delta the output tokens.
    message["usage"] = {**as_dict(message.get("usage")), **as_dict(event.get("usage"))}
    message.update({key: event[key] for key in (*_DROPPED, "model_version", "model_versions") if key in event})


def _json(text: str) -> Any:
    """Parse a tool's input from JSON; return the text itself if the JSON is incomplete."""
    try:
        return msgspec.json.decode(text) if text else {}
    except msgspec.DecodeError:
        return text
