"""The contract by which a call reaches its policy in another form than its client sent, and the answer comes back.

The relay sends, and the recorder keeps, what the policy's server reads and writes. The client alone sees the
translation.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, cast

import msgspec

from agl.dialects import Request
from agl.schemas import Dialect, Json

ClientApi: TypeAlias = Dialect | Literal["google"]
"""The API that a client speaks."""

CHAT = "/chat/completions"


class StreamTranslation(Protocol):
    """Translates one streamed answer as it arrives."""

    def feed(self, chunk: bytes) -> bytes:
        """Return what the client gets for the next bytes of the policy's server; ``b""`` while an event is open."""
        ...

    def end(self) -> bytes:
        """Return the end of the client's stream, once that of the server is complete."""
        ...


class Translation(Protocol):
    """Translates one call.

    Attributes:
        client_api: The client's API.
        content_type: That of a streamed answer.
        dropped: What the request asked for and the policy's server cannot do, once the request is translated.
    """

    client_api: ClientApi
    content_type: str
    dropped: tuple[str, ...]

    def asked(self, request: Request) -> Request:
        """Return the request to send; raises a 400 :class:`Problem` for one that cannot be."""
        ...

    def answer(self, body: bytes) -> bytes:
        """Return a whole answer for the client; raises a :class:`Problem` where it has nothing."""
        ...

    def failure(self, body: bytes, status: int) -> bytes:
        """Return the body of an error's answer for the client."""
        ...

    def stream(self) -> StreamTranslation:
        """Return what translates the streamed answer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A call in the form in which its policy's server gets it.

    Attributes:
        endpoint: The server's endpoint, such as ``/chat/completions``.
        translation: Translates the answer back; ``None`` where the client gets the server's own.
        notes: Attributes that name the parameters of sampling that the agent asked for in training.
    """

    request: Request
    endpoint: str
    translation: Translation | None = None
    notes: Mapping[str, Json] = field(default_factory=dict[str, Json])

    def translated(self, translation: Translation) -> "Outgoing":
        """Return the call as a chat completion; raises a :class:`Problem` where that cannot be."""
        return Outgoing(request=translation.asked(self.request), endpoint=CHAT, translation=translation)

    @property
    def client_api(self) -> ClientApi:
        """The API in which the client reads errors."""
        return self.request.dialect if self.translation is None else self.translation.client_api

    @property
    def dropped(self) -> tuple[str, ...]:
        """What the client asked for in vain, because the policy's server cannot do it."""
        return () if self.translation is None else self.translation.dropped


class EventSplitter:
    """Splits a stream of server-sent events, whose bytes arrive in any pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the events that have ended, without the blank line behind them."""
        *events, self._rest = (self._rest + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
        yield from events

    def rest(self) -> bytes:
        """Return the bytes of an event that has not ended."""
        return self._rest


def data_of(event: bytes) -> dict[str, Any]:
    """Return the JSON object of an event; an empty one for any other event."""
    data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
    return object_of(data)


def named_event(data: dict[str, Any]) -> bytes:
    """Return an event of messages or responses, which bears the name of its type."""
    return b"event: %b\ndata: %b\n\n" % (str(data.get("type")).encode(), msgspec.json.encode(data))


def object_of(data: bytes) -> dict[str, Any]:
    """Return the JSON object in ``data``; an empty one if it holds none."""
    try:
        found = msgspec.json.decode(data) if data else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return as_object(found)


def as_object(value: object) -> dict[str, Any]:
    """Return ``value`` if it is an object, else an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def objects_in(value: object) -> list[dict[str, Any]]:
    """Return the objects in ``value`` if it is an array, else none."""
    return [as_object(item) for item in cast("list[object]", value) if item] if isinstance(value, list) else []


def text_in(value: object) -> str:
    """Return ``value`` if it is text, else ``""``."""
    return value if isinstance(value, str) else ""
