"""Carries a model's thoughts through clients that only send back a field which they cannot read.

OpenAI's responses without a memory (``store: false``) send back the ``encrypted_content`` of a reasoning item and drop
its text. Anthropic's messages send back the ``signature`` of a thinking block, and may drop its text. Google's API has
``thoughtSignature``. Servers of open models fill none of these fields, so the thoughts would be missing in the next
prompt, which would then continue no sampled branch. The gateway seals the thoughts in these fields and restores them
before it sends the next request, so it needs no memory. Sealed values are compressed, not encrypted.

A seal of a translated answer holds the fields of the chat completion's message, as the server sent them. Some servers
refuse a request without them, and some refuse thoughts under another name than theirs.
"""

import base64
import binascii
import zlib
from collections.abc import Callable
from typing import Any, cast

import msgspec

from agl.dialects import Request, StreamedMessage
from agl_gateway.wire.problems import Problem
from agl_gateway.wire.translation import (
    ClientApi,
    EventSplitter,
    as_object,
    data_of,
    named_event,
    object_of,
    objects_in,
    thoughts_in,
)

_MAGIC = b"agl-v1"
MARK = base64.b64encode(_MAGIC)
"""The first bytes of every sealed value; a request body that does not contain them holds no sealed value."""

_MAX = 8 * 1024 * 1024
"""The maximum size of a request's decompressed thoughts, in bytes; more than any model's context holds."""

_LIST = 40
"""Bytes by which each list or object in a seal counts, because it takes more memory than its text."""

FIELDS = "fields"
"""The key, in the seal of a translated answer, of the fields of the chat completion's message."""

_URL_SAFE = str.maketrans("-_", "+/")


def seal(value: Any) -> str:
    """Seal a JSON value as compressed base64 text, which :class:`Unsealer` reads."""
    return base64.b64encode(_MAGIC + zlib.compress(msgspec.json.encode(value))).decode()


def message_fields(sealed: dict[str, Any], text: str) -> dict[str, Any]:
    """Return thoughts as fields of a chat completion's message.

    ``sealed`` is the content of their seal. Thoughts without such fields in it are given as ``text``; they get both
    names, because servers read only one of them.
    """
    return as_object(sealed.get(FIELDS)) or ({"reasoning": text, "reasoning_content": text} if text else {})


class Unsealer:
    """Reads the sealed values of one request; together they may decompress to 8 MiB at most."""

    def __init__(self) -> None:
        self._left = _MAX

    def read(self, text: object) -> Any:
        """Return the value that :func:`seal` put into ``text``, in either base64 alphabet; ``None`` for other text.

        Raises:
            Problem: 413 if the request's sealed values decompress to more than 8 MiB.
        """
        if not isinstance(text, str) or not text.startswith(MARK.decode()):
            return None
        try:
            packed = base64.b64decode(text.translate(_URL_SAFE) + "=" * (-len(text) % 4), validate=True)
            plain = self._inflated(packed.removeprefix(_MAGIC))
            return None if plain is None else msgspec.json.decode(plain)
        except (binascii.Error, zlib.error, ValueError, msgspec.DecodeError, RecursionError):
            return None

    def _inflated(self, packed: bytes) -> bytes | None:
        """Return the decompressed bytes of a stream; ``None`` if the stream is incomplete."""
        inflater = zlib.decompressobj()
        plain = inflater.decompress(packed, self._left + 1)
        self._left -= len(plain) + _LIST * (plain.count(b"[") + plain.count(b"{"))
        if self._left < 0:
            raise Problem(
                413,
                f"the request's sealed thoughts are longer than {_MAX >> 20} MiB; start a new conversation",
                code="request_too_large",
            )
        return plain if inflater.eof else None


_INCLUDE = "reasoning.encrypted_content"
_ITEM_EVENTS = ("response.output_item.added", "response.output_item.done")


def thoughts_of(asked: Request) -> "SealedResponses | SealedMessages | None":
    """Return the translation that seals the thoughts in a call's answer; ``None`` if no thoughts are requested."""
    if asked.dialect == "responses":
        include = asked.get("include")
        return SealedResponses() if isinstance(include, list) and _INCLUDE in include else None
    if asked.dialect == "messages":
        thinking = as_object(asked.get("thinking")).get("type", "disabled")
        return SealedMessages() if thinking != "disabled" else None
    return None


def restored(asked: Request) -> Request:
    """Return the request with the sealed thoughts of earlier answers restored to plain text of the client's API.

    Raises:
        Problem: 413 if the thoughts are longer than any model's context.
    """
    if MARK not in asked.body:
        return asked
    unsealer = Unsealer()
    if asked.dialect == "responses" and isinstance(items := asked.get("input"), list):
        return asked.changed({"input": [_restored_item(item, unsealer) for item in cast("list[Any]", items)]})
    if asked.dialect == "messages" and isinstance(messages := asked.get("messages"), list):
        return asked.changed({"messages": [_restored_message(one, unsealer) for one in cast("list[Any]", messages)]})
    return asked


def _restored_item(item: Any, unsealer: Unsealer) -> Any:
    fields = as_object(item)
    sealed = as_object(unsealer.read(fields.get("encrypted_content")))
    if FIELDS in sealed:
        sealed = {"content": [{"type": "reasoning_text", "text": thoughts_in(as_object(sealed[FIELDS]))}]}
    return {key: value for key, value in fields.items() if key != "encrypted_content"} | sealed if sealed else item


def _restored_message(message: Any, unsealer: Unsealer) -> Any:
    fields = as_object(message)
    blocks = fields.get("content")
    if not isinstance(blocks, list):
        return message
    return {**fields, "content": [_restored_block(block, unsealer) for block in cast("list[Any]", blocks)]}


def _restored_block(block: Any, unsealer: Unsealer) -> Any:
    sealed = as_object(unsealer.read(as_object(block).get("signature")))
    if FIELDS in sealed:
        return {"type": "thinking", "thinking": thoughts_in(as_object(sealed[FIELDS])), "signature": ""}
    return sealed or block


class _Unchanged:
    """Base of the translations that change nothing but the thoughts."""

    content_type = "text/event-stream"
    dropped: tuple[str, ...] = ()

    def asked(self, request: Request) -> Request:
        """Return the request with earlier thoughts restored."""
        return restored(request)

    def failure(self, body: bytes, status: int) -> bytes:
        """Return an error's body unchanged."""
        del status
        return body


class SealedResponses(_Unchanged):
    """Seals the thoughts of reasoning items in ``encrypted_content``, where the server left that field empty."""

    client_api: ClientApi = "responses"

    def answer(self, body: bytes) -> bytes:
        """Return the answer with its reasoning items sealed."""
        given = object_of(body)
        return msgspec.json.encode(_sealed_response(given)) if _has_thoughts(given.get("output")) else body

    def stream(self) -> "_SealedStream":
        """Return a translator that seals the items of a stream."""
        return _SealedStream(_responses_event)


class SealedMessages(_Unchanged):
    """Seals the thoughts of thinking blocks in ``signature``, where the server left that field empty."""

    client_api: ClientApi = "messages"

    def answer(self, body: bytes) -> bytes:
        """Return the answer with the thoughts of its thinking blocks sealed in ``signature``."""
        given = object_of(body)
        blocks = objects_in(given.get("content"))
        if not any(block.get("type") == "thinking" and not block.get("signature") for block in blocks):
            return body
        signed = [_signed_block(block) if block.get("type") == "thinking" else block for block in blocks]
        return msgspec.json.encode({**given, "content": signed})

    def stream(self) -> "_SealedStream":
        """Return a translator that seals the thinking blocks of a stream."""
        return _SealedStream(_OpenBlocks().event)


def _has_thoughts(output: Any) -> bool:
    return any(item.get("type") == "reasoning" for item in objects_in(output))


def _sealed_response(response: dict[str, Any]) -> dict[str, Any]:
    return {**response, "output": [_sealed_item(item) for item in objects_in(response.get("output"))]}


def _sealed_item(item: dict[str, Any]) -> dict[str, Any]:
    """Return a reasoning item with its thoughts sealed in ``encrypted_content``; other and sealed items unchanged."""
    if item.get("type") != "reasoning" or item.get("encrypted_content") or not item.get("content"):
        return item
    return {**item, "encrypted_content": seal({"content": item["content"], "summary": item.get("summary") or []})}


def _signed_block(block: dict[str, Any]) -> dict[str, Any]:
    """Return a thinking block with its thoughts sealed in ``signature``, unless it already has a signature."""
    return block if block.get("signature") else {**block, "signature": seal(block)}


def _responses_event(event: bytes) -> bytes:
    if b'"reasoning"' not in event:
        return event
    data = data_of(event)
    if data.get("type") in _ITEM_EVENTS:
        data["item"] = _sealed_item(as_object(data.get("item")))
    elif _has_thoughts(as_object(data.get("response")).get("output")):
        data["response"] = _sealed_response(as_object(data["response"]))
    else:
        return event
    return _event(data)


class _OpenBlocks:
    """Collects the thinking blocks of a stream, and adds a signature before the end of each block without one."""

    def __init__(self) -> None:
        self._blocks: dict[Any, StreamedMessage] = {}

    def event(self, event: bytes) -> bytes:
        if b"thinking" not in event and b"signature" not in event and b"content_block_stop" not in event:
            return event
        data = data_of(event)
        kind, index = data.get("type"), data.get("index")
        block, delta = as_object(data.get("content_block")), as_object(data.get("delta"))
        if kind == "content_block_start" and block.get("type") == "thinking":
            self._blocks[index] = StreamedMessage()
            self._blocks[index].add(block)
        elif kind == "content_block_delta" and index in self._blocks:
            self._blocks[index].add({key: delta[key] for key in ("thinking", "signature") if delta.get(key)})
        elif kind == "content_block_stop" and index in self._blocks:
            done = self._blocks.pop(index).whole()
            if done.get("signature"):
                return event
            signature = {"type": "signature_delta", "signature": seal(done)}
            return _event({"type": "content_block_delta", "index": index, "delta": signature}) + b"\n\n" + event
        return event


def _event(data: dict[str, Any]) -> bytes:
    return named_event(data).removesuffix(b"\n\n")


class _SealedStream:
    """Rewrites the events of a stream one by one."""

    def __init__(self, rewrite: Callable[[bytes], bytes]) -> None:
        self._events = EventSplitter()
        self._rewrite = rewrite

    def feed(self, chunk: bytes) -> bytes:
        """Return the rewritten events that are complete once ``chunk`` has arrived."""
        return b"".join(self._rewrite(event) + b"\n\n" for event in self._events.feed(chunk))

    def end(self) -> bytes:
        """Return the remaining bytes of a stream that does not end with a blank line."""
        return self._events.rest()
