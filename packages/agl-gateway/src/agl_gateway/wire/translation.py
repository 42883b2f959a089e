"""The contract of a translation: it sends a call to the policy in another API than the client's, and translates back.

The relay sends, and the recorder stores, the request and answer of the policy's server. Only the client sees the
translation.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, cast

import msgspec

from agl.dialects import Request
from agl.schemas import Dialect, Json

ClientApi: TypeAlias = Dialect | Literal["google"]
"""The API that a client uses."""

CHAT = "/chat/completions"

_BILLING = "x-anthropic-billing-header:"


class StreamTranslation(Protocol):
    """Translates one streamed answer as it arrives."""

    def feed(self, chunk: bytes) -> bytes:
        """Return the client's bytes for the next bytes from the server; ``b""`` while an event is incomplete."""
        ...

    def end(self) -> bytes:
        """Return the end of the client's stream, once the server's stream is complete."""
        ...


class Translation(Protocol):
    """Translates one call.

    Attributes:
        client_api: The client's API.
        content_type: The content type of a streamed answer.
        dropped: The parts of the request that the policy's server cannot serve; set by :meth:`asked`.
    """

    client_api: ClientApi
    content_type: str
    dropped: tuple[str, ...]

    def asked(self, request: Request) -> Request:
        """Return the request to send; raises a 400 :class:`Problem` if it cannot be translated."""
        ...

    def answer(self, body: bytes) -> bytes:
        """Return a whole answer for the client; raises a :class:`Problem` if the server's answer is unusable."""
        ...

    def failure(self, body: bytes, status: int) -> bytes:
        """Return the body of an error answer for the client."""
        ...

    def stream(self) -> StreamTranslation:
        """Return a translator for the streamed answer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A call in the form in which it is sent to its policy's server.

    Attributes:
        endpoint: The server's endpoint, such as ``/chat/completions``.
        translation: Translates the answer back; ``None`` if the client gets the server's own answer.
        notes: Span attributes that record the sampling parameters that the agent set in training.
    """

    request: Request
    endpoint: str
    translation: Translation | None = None
    notes: Mapping[str, Json] = field(default_factory=dict[str, Json])

    def translated(self, translation: Translation) -> "Outgoing":
        """Return the call as a chat completion; raises a :class:`Problem` if that is impossible."""
        return Outgoing(request=translation.asked(self.request), endpoint=CHAT, translation=translation)

    @property
    def client_api(self) -> ClientApi:
        """The API whose error format the client expects."""
        return self.request.dialect if self.translation is None else self.translation.client_api

    @property
    def dropped(self) -> tuple[str, ...]:
        """The parts of the client's request that the translation dropped, as the policy's server cannot serve them."""
        return () if self.translation is None else self.translation.dropped


_BLANK_LINE = re.compile(rb"\r?\n\r?\n")


class EventSplitter:
    """Splits a stream of server-sent events, whose bytes arrive in arbitrary pieces, in linear time."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the events that are complete once ``chunk`` has arrived, without the blank line after each."""
        searched = max(0, len(self._rest) - 3)  # the last three bytes may begin a blank line
        self._rest += chunk
        blanks = [found.span() for found in _BLANK_LINE.finditer(self._rest, searched)]
        starts = [0, *(end for _, end in blanks)]
        events = [bytes(self._rest[start:end]) for start, (end, _) in zip(starts, blanks, strict=False)]
        del self._rest[: starts[-1]]
        return [event.replace(b"\r\n", b"\n") for event in events]

    def rest(self) -> bytes:
        """Return the bytes of an incomplete event."""
        return bytes(self._rest)


def data_of(event: bytes) -> dict[str, Any]:
    """Return the JSON object in an event's data; an empty object if the data is not an object."""
    data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
    return object_of(data)


def named_event(data: dict[str, Any]) -> bytes:
    """Return a server-sent event whose name is the ``type`` of its data, as messages and responses have it."""
    return b"event: %b\ndata: %b\n\n" % (str(data.get("type")).encode(), msgspec.json.encode(data))


def object_of(data: bytes) -> dict[str, Any]:
    """Return the JSON object in ``data``; an empty one if ``data`` is not an object."""
    try:
        found = msgspec.json.decode(data) if data else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return as_object(found)


def as_object(value: object) -> dict[str, Any]:
    """Return ``value`` if it is an object, else an empty object."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def objects_in(value: object) -> list[dict[str, Any]]:
    """Return the non-empty items of an array, each as an object; an empty list if ``value`` is not an array."""
    return [as_object(item) for item in cast("list[object]", value) if item] if isinstance(value, list) else []


def text_in(value: object) -> str:
    """Return ``value`` if it is text, else ``""``."""
    return value if isinstance(value, str) else ""


def thoughts_in(fields: dict[str, Any]) -> str:
    """Return the thoughts in a chat completion's message or delta, whose field has one of two names."""
    return text_in(fields.get("reasoning_content")) or text_in(fields.get("reasoning"))


def opening_of(call: Request) -> list[Any] | None:
    """Return the system prompt and the messages up to the user's first; ``None`` if there is no user message."""
    is_response = call.dialect == "responses"
    if call.dialect not in ("chat", "messages", "responses") or call.get("previous_response_id"):
        return None
    system = _without_billing(call.get("instructions" if is_response else "system"))
    messages = call.get("input" if is_response else "messages")
    if isinstance(messages, str):
        return [system, messages]
    for index, message in enumerate(list_of(messages)):
        if as_object(message).get("role") == "user":
            return [system, *list_of(messages)[: index + 1]]
    return None


def _without_billing(system: Any) -> Any:
    """Return the system prompt without the blocks that hold Claude Code's billing line."""
    if not isinstance(system, list):
        return system
    return [block for block in list_of(system) if not str(as_object(block).get("text", "")).startswith(_BILLING)]


def list_of(value: Any) -> list[Any]:
    """Return ``value`` if it is an array, else an empty list."""
    return cast("list[Any]", value) if isinstance(value, list) else []
