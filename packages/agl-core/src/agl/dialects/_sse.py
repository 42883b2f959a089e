"""Reads server-sent events: the JSON payloads of a stream that may be cut or partly unreadable."""

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

BODY: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])
_BODIES: msgspec.json.Decoder[list[dict[str, Any]]] = msgspec.json.Decoder(list[dict[str, Any]])
_DONE = b"[DONE]"


def payloads(body: bytes) -> tuple[list[bytes], bool]:
    """Return the ``data`` of every complete event except ``[DONE]``, and whether ``[DONE]`` was received.

    Several data lines of one event are joined. A last event without its closing blank line was cut and is left out,
    unless its data is ``[DONE]``.
    """
    # The specification (https://html.spec.whatwg.org/multipage/server-sent-events.html) allows CR,
    # LF and CRLF as the end of a line; nearly every server sends LF.
    if b"\r" in body:
        body = body.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    events = body.split(b"\n\n")
    # What follows the last blank line: nothing, or an event that was cut.
    tail = events.pop()
    found: list[bytes] = []
    is_done = tail.strip() == b"data: [DONE]"
    for event in events:
        # The common form, without splitting lines; a stream has an event per token or two.
        data = event[6:] if event.startswith(b"data: ") and b"\n" not in event else _data_of(event)
        if data == _DONE:
            is_done = True
        elif data:
            found.append(data)
    return found, is_done


def _data_of(event: bytes) -> bytes:
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines).strip()


def decode_events(found: list[bytes], item: msgspec.json.Decoder[T], many: msgspec.json.Decoder[list[T]]) -> list[T]:
    """Decode the events; an event that is not valid JSON of the expected type is skipped.

    All events are decoded as one array, which costs a third of decoding them one by one. Only a stream with a broken
    event takes the slow path.
    """
    try:
        # A broken event makes this fail, or, in theory, two broken ones that complete each other;
        # then the array has another length than the list and a record is lost, which costs less
        # than decoding every stream twice.
        return many.decode(b"[" + b",".join(found) + b"]")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return [value for data in found if (value := _decode(data, item)) is not None]


def objects(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream that are JSON objects."""
    return decode_events(payloads(body)[0], BODY, _BODIES)


def _decode(data: bytes, item: msgspec.json.Decoder[T]) -> T | None:
    try:
        return item.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
