"""Reads server-sent events: the JSON payloads of a stream that may be cut or partly unreadable."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

BODY: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])
_BODIES: msgspec.json.Decoder[list[dict[str, Any]]] = msgspec.json.Decoder(list[dict[str, Any]])
_DONE = b"[DONE]"


# Events become many small objects, so only those of one part are in memory at once.
_PART = 1 << 18


def payloads(body: bytes) -> Iterator[tuple[list[bytes], bool]]:
    """Yield the ``data`` of the complete events except ``[DONE]``, part by part, and whether the part has a ``[DONE]``.

    Several data lines of one event are joined. A last event without its closing blank line was cut and is left out,
    unless its data is ``[DONE]``.
    """
    for events in _events(body):
        # The common form, without splitting lines; a stream has an event per token or two.
        found = [
            event[6:] if event.startswith(b"data: ") and b"\n" not in event else _data_of(event) for event in events
        ]
        del events  # one event may be most of the body
        yield [data for data in found if data and data != _DONE], _DONE in found


def _events(body: bytes) -> Iterator[list[bytes]]:
    """Yield the complete events of a stream, about 256 KiB at a time; a larger event comes alone."""
    # The specification (https://html.spec.whatwg.org/multipage/server-sent-events.html) allows CR,
    # LF and CRLF as the end of a line; nearly every server sends LF.
    if b"\r" in body:
        body = body.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    start = 0
    while len(body) - start > _PART:
        end = body.rfind(b"\n\n", start, start + _PART)
        if end < 0 and (end := body.find(b"\n\n", start + _PART - 1)) < 0:
            break
        yield body[start:end].split(b"\n\n")
        start = end + 2
    events = body[start:].split(b"\n\n")
    # What follows the last blank line: nothing, or an event that was cut.
    tail = events.pop()
    yield [*events, tail.strip()] if tail.strip() == b"data: [DONE]" else events


def _data_of(event: bytes) -> bytes:
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines).strip()


def decode_events(found: list[bytes], item: msgspec.json.Decoder[T], many: msgspec.json.Decoder[list[T]]) -> list[T]:
    """Decode the events; an event that is not valid JSON of the expected type is skipped.

    All events are decoded as one array, which costs a third of decoding them one by one. Only a stream with a broken
    event takes the slow path, and a single event, which may be large.
    """
    if len(found) > 1:
        # A broken event makes this fail, or, in theory, two broken ones that complete each other;
        # then the array has another length than the list and a record is lost, which costs less
        # than decoding every stream twice.
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            return many.decode(b"[%b]" % b",".join(found))
    return [value for data in found if (value := _decode(data, item)) is not None]


def objects(body: bytes) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream that are JSON objects."""
    for found, _ in payloads(body):
        yield from decode_events(found, BODY, _BODIES)


def _decode(data: bytes, item: msgspec.json.Decoder[T]) -> T | None:
    try:
        return item.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
