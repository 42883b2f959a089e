"""Splits an answer into pieces with their tokens; every dialect writes its plain or streamed response from these."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import msgspec

from agl_testing.model_server.codec import END, FunctionCall, decode, encode, logprob, render_call_head
from agl_testing.model_server.script import Dialect, Flavour, Reply

DONE = b"data: [DONE]\n\n"
"""The event that ends a stream of the chat and completions APIs."""

PieceKind: TypeAlias = Literal["text", "call", "arguments", "end"]


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one streamed event: text, the head of a tool call, a part of its arguments, or the end.

    Attributes:
        kind: The kind of content.
        text: The text, the name of the called function, or a part of the arguments' JSON.
        ids: Ids of the tokens in this piece.
        start: Position of the first of these tokens in the response.
        call: Index of the tool call; -1 for text and end.
    """

    kind: PieceKind
    text: str
    ids: list[int]
    start: int
    call: int = -1


class ScriptedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of the scripted model; a response has one for each choice.

    Attributes:
        text: The text.
        calls: The tool calls.
        call_ids: The id of each tool call.
        reason: The finish reason.
        pieces: All pieces in order.
    """

    text: str
    calls: tuple[FunctionCall, ...]
    call_ids: tuple[str, ...]
    reason: str
    pieces: tuple[Piece, ...]

    @property
    def ids(self) -> list[int]:
        """Ids of all sampled tokens, including the end token unless the finish reason is ``length``."""
        return [number for piece in self.pieces for number in piece.ids]


class ScriptedExchange(msgspec.Struct, frozen=True, kw_only=True):
    """A request and its answers, from which a dialect writes the response.

    Attributes:
        number: Number of the call on this server, from 1; response ids are derived from it.
        dialect: The API of the request.
        flavour: The model server whose token ids the response imitates.
        model: The model's name in the response.
        body: The request's parsed JSON.
        prompts: Token ids of each prompt; only a request of the completions API may have several.
        answers: The choices, ``n`` per prompt, in the order of the prompts.
        created: Time of the response in Unix seconds.
    """

    number: int
    dialect: Dialect
    flavour: Flavour
    model: str
    body: dict[str, Any]
    prompts: list[list[int]]
    answers: tuple[ScriptedAnswer, ...]
    created: int

    @property
    def wants_ids(self) -> bool:
        """True if the response must include token ids."""
        return bool(self.body.get("return_token_ids")) and self.flavour in ("vllm", "sglang", "every")

    @property
    def includes_usage(self) -> bool:
        """True if a stream must end with a usage chunk."""
        options: dict[str, Any] = self.body.get("stream_options") or {}
        return bool(options.get("include_usage"))

    def prompt_of(self, choice: int) -> list[int]:
        """Return the token ids of the prompt that the choice with this index answers."""
        # Choices are n per prompt, in the prompts' order.
        return self.prompts[choice * len(self.prompts) // len(self.answers)]

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens in all prompts."""
        return sum(map(len, self.prompts))

    @property
    def completion_tokens(self) -> int:
        """Number of tokens in all answers."""
        return sum(len(answer.ids) for answer in self.answers)


def answer_of(reply: Reply, *, number: int, choice: int) -> ScriptedAnswer:
    """Split ``reply`` into pieces; ids of tool calls are derived from the number of the model call and the choice."""
    calls = tuple(call.to_call() for call in reply.tool_calls)
    drafts: list[tuple[PieceKind, str, list[int], int]] = []
    for part in split(reply.text, reply.chunks):
        drafts.append(("text", part, encode(part), -1))
    for index, call in enumerate(calls):
        drafts.append(("call", call.name, render_call_head(call.name), index))
        for part in split(call.arguments, 2):
            drafts.append(("arguments", part, encode(part), index))
    drafts.append(("end", "", [] if reply.reason == "length" else [END], -1))
    pieces: list[Piece] = []
    position = 0
    for kind, text, ids, index in drafts:
        pieces.append(Piece(kind=kind, text=text, ids=ids, start=position, call=index))
        position += len(ids)
    call_ids = tuple(f"call_{number}_{choice}_{index}" for index in range(len(calls)))
    return ScriptedAnswer(text=reply.text, calls=calls, call_ids=call_ids, reason=reply.reason, pieces=tuple(pieces))


def split(text: str, chunks: int | tuple[str, ...]) -> list[str]:
    """Split ``text`` into ``chunks`` parts of nearly equal length, or into the given parts; drop empty parts."""
    if not isinstance(chunks, int):
        if "".join(chunks) != text:
            raise ValueError(f"the chunks {chunks!r} do not add up to the reply's text {text!r}; make them equal")
        return [part for part in chunks if part]
    count = max(1, min(chunks, len(text)))
    bounds = [len(text) * index // count for index in range(count + 1)]
    return [text[start:stop] for start, stop in pairwise(bounds) if stop > start]


def logprobs_of(ids: Sequence[int], start: int = 0) -> list[float]:
    """Return the log-probabilities of the tokens ``ids``, which begin at position ``start`` of the response."""
    return [logprob(token, position) for position, token in enumerate(ids, start)]


def content_logprobs(ids: Sequence[int], start: int, *, with_top: bool = False) -> list[dict[str, Any]]:
    """Return the log-probabilities of tokens in the form of the chat and responses APIs, one entry per token."""
    entries: list[dict[str, Any]] = []
    for token, value in zip(ids, logprobs_of(ids, start), strict=True):
        text = decode([token])
        entry: dict[str, Any] = {"token": text, "logprob": value, "bytes": list(text.encode())}
        entries.append({**entry, "top_logprobs": [dict(entry)] if with_top else []})
    return entries


def data_event(value: dict[str, Any]) -> bytes:
    """Return a server-sent event without a name, as in chat and text completions."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """Return a server-sent event named by its ``type``, as in responses and messages."""
    return b"event: " + str(value["type"]).encode() + b"\n" + data_event(value)
