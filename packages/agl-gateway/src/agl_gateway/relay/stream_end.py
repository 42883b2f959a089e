"""Finds the last event of a streamed answer, after which clients stop to read.

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

import msgspec

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
