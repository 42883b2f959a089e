"""Reads chat completions and completions, as bodies or streams, with token ids in vLLM's or SGLang's fields.

vLLM has ``prompt_token_ids`` at the top of a chat completion (in a stream: on the first chunk) and in each choice of a
completion; the answer's ids are in ``choices[i].token_ids`` (in a stream: the ids of the delta). SGLang has
``choices[i].prompt_token_ids`` and ``choices[i].response_token_ids``. The content of a choice is a ``message`` in chat
completions and a ``text`` in completions.
"""

from typing import Any, Literal

import msgspec

from agl.dialects._exchange import Answer, Choice
from agl.dialects._foreign import as_dict, version_in
from agl.dialects._sse import decode_events, payloads
from agl.dialects._streamed_message import StreamedMessage
from agl.schemas import Json

ContentKey = Literal["message", "text"]


# Only what is read: msgspec skips all other fields without making objects of them, which makes a
# body of 200 tokens with top log-probabilities several times cheaper.
class _Token(msgspec.Struct, gc=False):
    logprob: float | None = None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Token] | None = None
    token_logprobs: list[float | None] | None = None

    def values(self) -> list[float | None] | None:
        return self.token_logprobs if self.content is None else [token.logprob for token in self.content]


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    message: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    text: str | None = None
    finish_reason: Any = None
    # vLLM's: the stop string or token id that ended the answer.
    stop_reason: Any = None
    logprobs: _Logprobs | None = None
    # vLLM puts these next to the choices of a chat completion, and into each choice of a completion.
    token_ids: list[int] | None = None
    response_token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None

    def ids(self) -> list[int] | None:
        return self.response_token_ids if self.token_ids is None else self.token_ids


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: Any = None
    prompt_token_ids: list[int] | None = None
    # agl's own policy server's: where the pictures of the prompt lie.
    prompt_media: Any = None
    processor: Any = None
    model_version: Any = None
    model_versions: Any = None
    weight_versions: Any = None
    error: Any = None


class _Body(_Chunk, gc=False):
    id: Any = None
    object: Any = None
    created: Any = None
    model: Any = None
    system_fingerprint: Any = None
    service_tier: Any = None


_BODY = msgspec.json.Decoder(_Body)
_CHUNK = msgspec.json.Decoder(_Chunk)
_CHUNKS = msgspec.json.Decoder(list[_Chunk])
_VERSION_FIELDS = ("model_version", "model_versions", "weight_versions")
# Fields of the body that are recorded; all others are in the choice or in the packed tokens.
_HEAD_FIELDS = ("id", "object", "created", "model", "system_fingerprint", "service_tier", "usage")


def read_body(data: bytes, content_key: ContentKey = "message") -> Answer:
    """Parse the answer in a plain body; raises :class:`msgspec.DecodeError` if the body has no such answer."""
    body = _BODY.decode(data)
    choices = tuple(_plain_choice(body, choice, content_key) for choice in body.choices)
    return _answer(body, choices, error_text(body.error))


def _plain_choice(body: _Body, choice: _Choice, content_key: ContentKey) -> Choice:
    reason = choice.finish_reason
    content = choice.message if content_key == "message" else choice.text or ""
    return Choice(
        index=choice.index,
        response=_response(body, choice.index, {content_key: content}, choice.stop_reason, reason),
        finish_reason=reason if isinstance(reason, str) else "",
        prompt_ids=body.prompt_token_ids if choice.prompt_token_ids is None else choice.prompt_token_ids,
        response_ids=choice.ids(),
        logprobs=choice.logprobs.values() if choice.logprobs is not None else None,
    )


def _answer(body: _Body, choices: tuple[Choice, ...], error: str) -> Answer:
    return Answer(
        choices=choices,
        model_version=_version(body),
        error=error,
        prompt_media=body.prompt_media,
        processor=body.processor,
    )


def _version(body: _Body) -> str:
    return version_in({name: getattr(body, name) for name in _VERSION_FIELDS})


def _response(
    body: _Body, index: int, content: dict[str, Json], stop_reason: Json, finish_reason: Json
) -> dict[str, Json]:
    head = {name: value for name in _HEAD_FIELDS if (value := getattr(body, name)) is not None}
    choice = {"index": index, **content, "finish_reason": finish_reason}
    if stop_reason is not None:
        choice["stop_reason"] = stop_reason
    return {**head, "choices": [choice]}


def error_text(error: object) -> str:
    """The text of a body's ``error`` field, which may be an object; ``""`` if the field is empty."""
    return str(as_dict(error).get("message") or error) if error else ""


class _ChoiceBuilder:
    """Builds one choice of a stream from its deltas."""

    def __init__(self) -> None:
        self.message = StreamedMessage()
        self.ids: list[int] | None = None
        self.prompt_ids: list[int] | None = None
        self.logprobs: list[float | None] | None = None
        self.finish_reason: Json = None
        self.stop_reason: Json = None

    def add(self, choice: _Choice) -> None:
        """Add one delta of the choice, with its tokens."""
        self.message.add(choice.delta or {"text": choice.text})
        if (ids := choice.ids()) is not None:
            self.ids = self.ids or []
            self.ids += ids
        if choice.logprobs is not None and (values := choice.logprobs.values()) is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += values
        self.prompt_ids = choice.prompt_token_ids or self.prompt_ids
        self.finish_reason = choice.finish_reason or self.finish_reason
        self.stop_reason = choice.stop_reason if choice.stop_reason is not None else self.stop_reason

    def content(self, content_key: ContentKey) -> dict[str, Json]:
        """The choice's text or assistant message, in the form of a plain body."""
        found = self.message.whole()
        if content_key == "text":
            return {"text": found.get("text", "")}
        message: dict[str, Json] = {"role": "assistant", "content": None, **found}
        if message.get("tool_calls"):
            # Without text, OpenAI's content is null next to tool calls and that of some servers is
            # ""; a plain body has null.
            message["content"] = message["content"] or None
        return {"message": message}


def read_stream(data: bytes, content_key: ContentKey = "message") -> Answer:
    """Parse the part of an answer that has arrived in a stream."""
    builders: dict[int, _ChoiceBuilder] = {}
    body, error, is_done = None, "", False
    for found, is_last in payloads(data):
        is_done |= is_last
        chunks = decode_events(found, _CHUNK, _CHUNKS)
        for chunk in chunks:
            for choice in chunk.choices:
                builder = builders.get(choice.index)
                if builder is None:
                    builder = builders[choice.index] = _ChoiceBuilder()
                builder.add(choice)
        # Servers report an error in the middle of a stream as an event, after the status 200.
        error = error or next((text for chunk in chunks if (text := error_text(chunk.error))), "")
        if (body := body or _head(found)) is not None:
            _merge(body, chunks)
    if body is None or not builders:
        return Answer(error=error)
    body.object = "text_completion" if body.object == "text_completion" else "chat.completion"
    choices = tuple(
        _streamed_choice(body, index, builders[index], content_key, is_done=is_done) for index in sorted(builders)
    )
    return _answer(body, choices, error)


def _head(found: list[bytes]) -> _Body | None:
    """The first event that is a readable chunk, which has the answer's id and model; ``None`` without one."""
    # The first event may be a comment or a ping of a proxy.
    for data in found:
        try:
            return _BODY.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return None


def _merge(body: _Body, chunks: list[_Chunk]) -> None:
    """Add to ``body``, the stream's first chunk, the first prompt ids and the last other fields of ``chunks``."""
    for chunk in chunks:
        # On the first chunk of a vLLM stream only.
        body.prompt_token_ids = body.prompt_token_ids or chunk.prompt_token_ids
        for name in ("usage", "prompt_media", "processor", *_VERSION_FIELDS):
            if value := getattr(chunk, name):
                setattr(body, name, value)


def _streamed_choice(
    body: _Body, index: int, builder: _ChoiceBuilder, content_key: ContentKey, *, is_done: bool
) -> Choice:
    reason = builder.finish_reason
    return Choice(
        index=index,
        response=_response(body, index, builder.content(content_key), builder.stop_reason, reason),
        finish_reason=reason if isinstance(reason, str) else "",
        prompt_ids=body.prompt_token_ids if builder.prompt_ids is None else builder.prompt_ids,
        response_ids=builder.ids,
        logprobs=builder.logprobs,
        is_finished=is_done or reason is not None,
    )
