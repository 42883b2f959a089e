"""Writes chat completions as answers of Google's API: whole, streamed as events or as one JSON array, and errors."""

from collections.abc import Iterator
from typing import Any

import msgspec

from agl.dialects import Request
from agl.schemas import Json
from agl_gateway.wire.chat_answers import Pieces, error_in, usage_of
from agl_gateway.wire.google_requests import chat_request
from agl_gateway.wire.problems import google_error
from agl_gateway.wire.sealed import seal
from agl_gateway.wire.translation import EventSplitter, Shape, as_object, data_of, object_of, objects_in, text_in

_REASONS = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS", "content_filter": "SAFETY"}


class GoogleTranslation:
    """Translates a call of ``generateContent`` or ``streamGenerateContent`` to a chat completion, and back.

    Args:
        model: The model that the path names.
        is_streamed: Whether the answer is streamed.
        is_sse: Whether it is streamed as events (``alt=sse``) rather than as the elements of a JSON array.
    """

    shape: Shape = "google"
    dropped: tuple[str, ...] = ()

    def __init__(self, *, model: str, is_streamed: bool, is_sse: bool) -> None:
        self._model = model
        self._is_streamed = is_streamed
        self._is_sse = is_sse
        self.content_type = "text/event-stream" if is_sse else "application/json"

    def asked(self, request: Request) -> Request:
        """Return the request as a chat completion."""
        return chat_request(request, model=self._model, is_streamed=self._is_streamed)

    def answer(self, body: bytes) -> bytes:
        """Return a chat completion as one answer with its candidates."""
        given = object_of(body)
        candidates = [_whole(choice) for choice in objects_in(given.get("choices"))]
        return msgspec.json.encode({"candidates": candidates, **_about(given, self._model)})

    def failure(self, body: bytes, status: int) -> bytes:
        """Return an error with the message of the policy's server."""
        message, _ = error_in(object_of(body), body)
        return google_error(status, message)

    def stream(self) -> "GoogleStream":
        """Return what translates the streamed answer."""
        return GoogleStream(self._model, is_sse=self._is_sse)


def _whole(choice: dict[str, Any]) -> dict[str, Json]:
    message, building = as_object(choice.get("message")), _Candidate()
    parts = [*building.delta(message), *building.end()]
    reason = _REASONS.get(text_in(choice.get("finish_reason")), "OTHER")
    return {"content": {"role": "model", "parts": parts}, "finishReason": reason, "index": choice.get("index", 0)}


def _about(given: dict[str, Any], model: str) -> dict[str, Json]:
    found = dict[str, Json]()
    if given.get("usage"):
        usage = usage_of(given)
        found["usageMetadata"] = {
            "promptTokenCount": usage.prompt,
            **({"cachedContentTokenCount": usage.cached} if usage.cached else {}),
            **({"thoughtsTokenCount": usage.thoughts} if usage.thoughts else {}),
            "candidatesTokenCount": max(0, usage.answer - usage.thoughts),
            "totalTokenCount": usage.prompt + usage.answer,
        }
    return {**found, "modelVersion": text_in(given.get("model")) or model, "responseId": text_in(given.get("id"))}


class _Candidate:
    """Builds the parts of one candidate from a message, or from its deltas."""

    def __init__(self) -> None:
        self._pieces = Pieces()
        self._reasoning = ""
        self._has_sealed = False

    def delta(self, delta: dict[str, Any]) -> Iterator[dict[str, Json]]:
        for step, piece, text in self._pieces.add(delta):
            if step == "grown" and piece.kind == "thought":
                self._reasoning += text
                yield {"text": text, "thought": True}
            elif step == "grown":
                yield {"text": text}

    def end(self) -> Iterator[dict[str, Json]]:
        """Yield the calls, and a signature with the thoughts where no call can carry them."""
        for step, call, _ in self._pieces.end():
            if step == "closed" and call.kind == "call":
                sealed = {"arguments": call.text, **self._thoughts()}
                called = {"id": call.id, "name": call.name, "args": object_of(call.text.encode())}
                yield {"functionCall": called, "thoughtSignature": seal(sealed)}
        if thoughts := self._thoughts():
            yield {"text": "", "thoughtSignature": seal(thoughts)}

    def _thoughts(self) -> dict[str, str]:
        if self._has_sealed or not self._reasoning:
            return {}
        self._has_sealed = True
        return {"reasoning": self._reasoning}


class GoogleStream:
    """Translates the events of a chat completion; each becomes one answer with the parts that are new.

    The end of a candidate waits for the usage, which comes after it, because clients expect both in the last answer.
    """

    def __init__(self, model: str, *, is_sse: bool) -> None:
        self._model = model
        self._is_sse = is_sse
        self._events = EventSplitter()
        self._candidates: dict[int, _Candidate] = {}
        self._ended: dict[int, Json] = {}
        self._last: dict[str, Json] = {}
        self._count = 0
        self._is_failed = False

    def feed(self, chunk: bytes) -> bytes:
        """Return the answers for the events that ended with these bytes."""
        return b"".join(self._answer(data_of(event)) for event in self._events.feed(chunk))

    def end(self) -> bytes:
        """Return the last answer, and the end of the array; an error where a candidate has no end."""
        last = b"" if self._is_failed else self._last_answer()
        return last if self._is_sse else last + b"]"

    def _last_answer(self) -> bytes:
        if not self._ended or self._candidates.keys() - self._ended.keys():
            return self._error(500, "the policy's stream ended before its answer did")
        return self._framed(msgspec.json.encode({"candidates": [*self._ended.values()], **self._last}))

    def _error(self, status: int, message: str) -> bytes:
        self._is_failed = True
        return self._framed(google_error(status, message))

    def _answer(self, chunk: dict[str, Any]) -> bytes:
        if chunk.get("error"):
            error = as_object(chunk["error"])
            status = error.get("code") if isinstance(error.get("code"), int) else 500
            return self._error(int(status or 500), str(error.get("message") or chunk["error"]))
        found = [one for choice in objects_in(chunk.get("choices")) if (one := self._candidate(choice))]
        about = _about(chunk, self._model)
        for one in found:
            if "finishReason" in one:
                self._ended.setdefault(one["index"], one)
        self._last |= about
        going = [one for one in found if "finishReason" not in one]
        return self._framed(msgspec.json.encode({"candidates": going, **about})) if going else b""

    def _candidate(self, choice: dict[str, Any]) -> dict[str, Json] | None:
        at = choice.get("index")
        index = at if isinstance(at, int) else 0
        building = self._candidates.setdefault(index, _Candidate())
        parts = [*building.delta(as_object(choice.get("delta")))]
        reason = text_in(choice.get("finish_reason"))
        if reason:
            parts += building.end()
        if not (parts or reason):
            return None
        ended = {"finishReason": _REASONS.get(reason, "OTHER")} if reason else {}
        return {"content": {"role": "model", "parts": parts}, **ended, "index": index}

    def _framed(self, body: bytes) -> bytes:
        self._count += 1
        if self._is_sse:
            return b"data: " + body + b"\r\n\r\n"
        return (b"[" if self._count == 1 else b",\r\n") + body
