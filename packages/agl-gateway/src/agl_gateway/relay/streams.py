"""Passes a streamed answer on as it arrives, and finds its last event, after which clients stop to read.

Only lines of server-sent events count, never the text within one: an answer may well be about such events.

==================  ==================================================================================
API                 its last event
==================  ==================================================================================
chat, completions   ``data: [DONE]``
responses           of the type ``response.completed``, ``response.incomplete`` or ``response.failed``
messages            of the type ``message_stop``
==================  ==================================================================================

Google's clients get translations of chat completions.
"""

import asyncio
from dataclasses import dataclass, field

import aiohttp
import msgspec
from aiohttp import web

from agl_gateway.wire.translation import StreamTranslation

_END_OF_BODY_S = 1.0
"""Seconds in which the body of a stream ends after its last event."""

_DONE = b"[DONE]"
_LAST_TYPES = (b"message_stop", b"response.completed", b"response.incomplete", b"response.failed")
_MARKS = (_DONE, *_LAST_TYPES)


class _Event(msgspec.Struct):
    type: str = ""


_EVENT: msgspec.json.Decoder[_Event] = msgspec.json.Decoder(_Event)


class StreamEnd:
    """Reads a stream whose bytes arrive in any pieces; costs a search for each mark where none is found.

    Attributes:
        has_begun: A line that only the last event has is here; a client that reads line by line may stop there.
        is_here: The last event is here as a whole.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self.is_here = False
        self._open: list[bytes] = []

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes."""
        ended = chunk.rfind(b"\n") + 1
        if not ended:
            self._open.append(chunk)
            return
        text = b"".join((*self._open, chunk[:ended])) if self._open else chunk[:ended]
        self._open = [chunk[ended:]] if ended < len(chunk) else []
        if self.has_begun or _is_marked(text):
            for line in text.splitlines():
                self._read(line)

    def _read(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        value = value.strip()
        if not line:  # it ends the event
            self.is_here = self.has_begun
        elif field == b"event":
            self.has_begun |= value in _LAST_TYPES
        elif field == b"data":
            self.has_begun |= value == _DONE or _type_of(value) in _LAST_TYPES


def _is_marked(text: bytes) -> bool:
    return any(mark in text for mark in _MARKS)


def _type_of(data: bytes) -> bytes:
    """Return the type of an event with a mark anywhere in its JSON; ``b""`` for any other."""
    if not _is_marked(data):
        return b""
    try:
        return _EVENT.decode(data).type.encode()
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return b""


@dataclass(eq=False, kw_only=True)
class Pump:
    """Passes a body on as it arrives.

    Attributes:
        translation: Translates the body for the client; ``None`` where the client speaks the backend's API.
        holds_end: Keep the last event back, for the caller to send once the call is durable: clients take it for the
            end, and an answer whose end they have seen must not get lost.
        chunks: The backend's bytes.
        held: The client's bytes that were kept back.
    """

    response: aiohttp.ClientResponse
    reply: web.StreamResponse
    translation: StreamTranslation | None
    holds_end: bool
    chunks: list[bytes] = field(default_factory=list[bytes], init=False)
    held: bytes = field(default=b"", init=False)
    _end: StreamEnd = field(default_factory=StreamEnd, init=False)

    async def run(self) -> str:
        """Return the error that cut the body short, ``""`` if it is complete.

        Raises :class:`ConnectionError` when the client is gone.
        """
        body = self.response.content
        while True:
            try:
                if self._end.is_here:
                    async with asyncio.timeout(_END_OF_BODY_S):
                        chunk = await body.readany()
                else:
                    chunk = await body.readany()
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                if not self._end.is_here:
                    return f"the backend's stream broke off: {error or type(error).__name__}"
                chunk = b""  # the last event is here, whatever becomes of the connection
            if not chunk:
                await self._pass(b"" if self.translation is None else self.translation.end())
                return ""
            self.chunks.append(chunk)
            if self.holds_end:
                self._end.feed(chunk)
            await self._pass(chunk if self.translation is None else self.translation.feed(chunk))

    async def _pass(self, passed: bytes) -> None:
        if self._end.has_begun:
            self.held += passed
        elif passed:
            await self.reply.write(passed)
