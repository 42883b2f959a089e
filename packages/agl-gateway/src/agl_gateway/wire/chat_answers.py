"""Reads the answers of chat completions, whole and streamed, for the APIs into which they are translated.

An answer is cut into pieces in their order: thoughts, texts and tool calls. A tool call comes once it is whole, at the
end of the answer, because servers may send the parts of several in any order. Of several choices the first is read.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from agl_gateway.wire.translation import EventSplitter, as_object, data_of, objects_in, text_in

Kind: TypeAlias = Literal["thought", "text", "call"]
Step: TypeAlias = Literal["opened", "grown", "closed"]


@dataclass(slots=True)
class Piece:
    """A piece of an answer.

    Attributes:
        text: The text so far; of a call, the JSON text of its arguments.
        id: The call's id; ``name`` that of the function.
    """

    kind: Kind
    text: str = ""
    id: str = ""
    name: str = ""


Change: TypeAlias = tuple[Step, Piece, str]
"""A step in the life of a piece (opened, grown, closed), with the text by which it has grown."""


class Pieces:
    """Builds the pieces of one choice from its message, or from its deltas."""

    def __init__(self) -> None:
        self._open: Piece | None = None
        self._calls: dict[int, Piece] = {}

    def add(self, delta: dict[str, Any]) -> Iterator[Change]:
        """Yield the changes by a message or a delta of one."""
        yield from self._grow("thought", text_in(delta.get("reasoning_content")) or text_in(delta.get("reasoning")))
        yield from self._grow("text", text_in(delta.get("content")) or text_in(delta.get("refusal")))
        for place, part in enumerate(objects_in(delta.get("tool_calls"))):
            at = part.get("index")
            call = self._calls.setdefault(at if isinstance(at, int) else place, Piece("call"))
            function = as_object(part.get("function"))
            call.id = text_in(part.get("id")) or call.id
            call.name += text_in(function.get("name"))
            call.text += text_in(function.get("arguments"))

    def end(self) -> Iterator[Change]:
        """Yield the end of the open piece, and the calls."""
        yield from self._close()
        for _, call in sorted(self._calls.items()):
            yield "opened", call, ""
            if call.text:
                yield "grown", call, call.text
            yield "closed", call, ""
        self._calls = {}

    def _grow(self, kind: Kind, text: str) -> Iterator[Change]:
        if not text:
            return
        if self._open is None or self._open.kind != kind:
            yield from self._close()
            self._open = Piece(kind)
            yield "opened", self._open, ""
        self._open.text += text
        yield "grown", self._open, text

    def _close(self) -> Iterator[Change]:
        if self._open is not None:
            yield "closed", self._open, ""
        self._open = None


def pieces_of(message: dict[str, Any]) -> list[Piece]:
    """Return the pieces of a whole message."""
    building = Pieces()
    return [piece for step, piece, _ in (*building.add(message), *building.end()) if step == "closed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The tokens of a call.

    Attributes:
        cached: Those of the prompt that were not computed again.
        thoughts: Those of the answer that are thoughts, where the server counts them.
    """

    prompt: int = 0
    answer: int = 0
    cached: int = 0
    thoughts: int = 0


def usage_of(given: dict[str, Any]) -> Usage:
    """Return the usage in an answer or a chunk, zeros where there is none."""
    usage = as_object(given.get("usage"))
    asked, answered = (as_object(usage.get(f"{kind}_tokens_details")) for kind in ("prompt", "completion"))
    return Usage(
        prompt=_count(usage.get("prompt_tokens")),
        answer=_count(usage.get("completion_tokens")),
        cached=_count(asked.get("cached_tokens")),
        thoughts=_count(answered.get("reasoning_tokens")) or _count(usage.get("reasoning_tokens")),
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def first_choice(given: dict[str, Any]) -> dict[str, Any]:
    """Return the first choice in an answer or a chunk; an empty one without any."""
    return next((one for one in objects_in(given.get("choices")) if not one.get("index")), dict[str, Any]())


def error_in(given: dict[str, Any], body: bytes = b"") -> tuple[str, str]:
    """Return the message of a server's error, whatever its form, and its code; the start of ``body`` without one."""
    error = given.get("error")
    found = as_object(error).get("message") or error or given.get("message") or given.get("detail")
    text = str(found or body[:2000].decode("utf-8", "replace"))
    code = text_in(as_object(error).get("code"))
    is_too_long = "context length" in text or "context_length" in code
    return text, "context_length_exceeded" if is_too_long else code


class ChatEvents:
    """Reads a streamed chat completion.

    Attributes:
        head: The fields of the first chunk.
        usage: The usage, once it has come.
        reason: Why the answer ended; ``""`` before its end.
        stop: The stop sequence that ended it, where the server names it.
    """

    def __init__(self) -> None:
        self._events = EventSplitter()
        self._pieces = Pieces()
        self.head: dict[str, Any] = {}
        self.usage = Usage()
        self.reason = ""
        self.stop = ""

    def chunks(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the chunks that ended with these bytes."""
        for event in self._events.feed(data):
            chunk = data_of(event)
            if not chunk:
                continue
            self.head = self.head or chunk
            if chunk.get("usage"):
                self.usage = usage_of(chunk)
            yield chunk

    def changes(self, chunk: dict[str, Any]) -> Iterator[Change]:
        """Yield the changes by a chunk."""
        choice = first_choice(chunk)
        yield from self._pieces.add(as_object(choice.get("delta")))
        self.stop = text_in(choice.get("stop_reason")) or self.stop
        if reason := text_in(choice.get("finish_reason")):
            self.reason = reason
            yield from self._pieces.end()
