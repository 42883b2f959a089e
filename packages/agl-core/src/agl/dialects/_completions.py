"""Completions: text in, text out; vLLM puts both prompt and response ids into the choice."""

from typing import Any

import msgspec

from agl.dialects._chat import error_text
from agl.dialects._exchange import Answer, Choice
from agl.dialects._sse import decode_events, payloads
from agl.dialects._versions import version_of


class _Logprobs(msgspec.Struct, gc=False):
    token_logprobs: list[float | None] | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    text: str | None = None
    finish_reason: Any = None
    stop_reason: Any = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    response_token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Body(msgspec.Struct, gc=False):
    id: Any = None
    object: Any = None
    created: Any = None
    model: Any = None
    system_fingerprint: Any = None
    usage: Any = None
    prompt_token_ids: list[int] | None = None
    model_version: Any = None
    model_versions: Any = None
    weight_versions: Any = None
    error: Any = None
    choices: list[_Choice] = []


_DECODER = msgspec.json.Decoder(_Body)
_DECODER_OF_MANY = msgspec.json.Decoder(list[_Body])
_HEAD_FIELDS = ("id", "object", "created", "model", "system_fingerprint", "usage")


def read_body(data: bytes) -> Answer:
    """The answer in a plain body; raises :class:`msgspec.DecodeError` for what is none."""
    return _read([_DECODER.decode(data)], is_done=True)


def read_stream(data: bytes) -> Answer:
    """The answer in a stream, as far as it came."""
    found, is_done = payloads(data)
    return _read(decode_events(found, _DECODER, _DECODER_OF_MANY), is_done=is_done)


def _read(chunks: list[_Body], *, is_done: bool) -> Answer:
    parts: dict[int, list[_Choice]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            parts.setdefault(choice.index, []).append(choice)
    error = next((text for chunk in chunks if (text := error_text(chunk.error))), "")
    head = _head(chunks)
    prompt_ids = next((chunk.prompt_token_ids for chunk in chunks if chunk.prompt_token_ids is not None), None)
    choices = tuple(_choice(head, index, parts[index], prompt_ids, is_done=is_done) for index in sorted(parts))
    return Answer(choices=choices, model_version=_version(chunks), error=error)


def _version(chunks: list[_Body]) -> str:
    named = (version_of(chunk.model_version, chunk.model_versions, chunk.weight_versions) for chunk in chunks)
    return next((version for version in reversed(list(named)) if version), "")


def _head(chunks: list[_Body]) -> dict[str, Any]:
    head: dict[str, Any] = {}
    for chunk in chunks:
        for name in _HEAD_FIELDS:
            if name not in head and (value := getattr(chunk, name)) is not None:
                head[name] = value
        if chunk.usage is not None:
            head["usage"] = chunk.usage
    return head


def _choice(
    head: dict[str, Any], index: int, parts: list[_Choice], prompt_ids: list[int] | None, *, is_done: bool
) -> Choice:
    text = "".join(part.text or "" for part in parts)
    reason = next((part.finish_reason for part in reversed(parts) if part.finish_reason is not None), None)
    stop = next((part.stop_reason for part in reversed(parts) if part.stop_reason is not None), None)
    body: dict[str, Any] = {"index": index, "text": text, "finish_reason": reason}
    if stop is not None:
        body["stop_reason"] = stop
    return Choice(
        index=index,
        response={**head, "choices": [body]},
        finish_reason=reason if isinstance(reason, str) else "",
        prompt_ids=next((part.prompt_token_ids for part in parts if part.prompt_token_ids is not None), prompt_ids),
        response_ids=_ids(parts),
        logprobs=_logprobs(parts),
        is_finished=is_done or reason is not None,
    )


def _ids(parts: list[_Choice]) -> list[int] | None:
    listed = [ids for part in parts if (ids := part.token_ids or part.response_token_ids) is not None]
    return [number for ids in listed for number in ids] if listed else None


def _logprobs(parts: list[_Choice]) -> list[float | None] | None:
    listed = [part.logprobs.token_logprobs for part in parts if part.logprobs and part.logprobs.token_logprobs]
    return [value for values in listed for value in values] if listed else None
