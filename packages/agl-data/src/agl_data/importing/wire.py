"""OTLP as Protobuf, in the form of its JSON: a decoder for the few messages of a batch of spans.

Files are framed in one of three ways: one request or several as an HTTP exporter sends them, requests that each have
their length as a varint before them, as OTLP's file format says, and requests with a length of four bytes, as the
collector's file exporter writes them, which may compress each one with zstd.
"""

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from agl.errors import DatasetError
from agl.schemas import Json
from agl_data.importing.source import MAX_RECORD, ZSTD, Line, decoded, opened, unpack_zstd
from agl_data.importing.values import is_storable, storable

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_DEEPEST = 100
_MOST_HEAD = 16
"""Bytes by which the framing is recognised: lengths, tags, and what is in the first field."""


class _Field(NamedTuple):
    """A field of a message: its name in JSON, its kind, the message that it holds, and whether it is repeated."""

    name: str
    kind: str
    message: str = ""
    is_list: bool = False


_MESSAGES: dict[str, dict[int, _Field]] = {
    "batch": {1: _Field("resourceSpans", "message", "resource", True)},
    "resource": {2: _Field("scopeSpans", "message", "scope", True)},
    "scope": {2: _Field("spans", "message", "span", True)},
    "span": {
        1: _Field("traceId", "id"),
        2: _Field("spanId", "id"),
        4: _Field("parentSpanId", "id"),
        5: _Field("name", "text"),
        6: _Field("kind", "int"),
        7: _Field("startTimeUnixNano", "fixed"),
        8: _Field("endTimeUnixNano", "fixed"),
        9: _Field("attributes", "message", "pair", True),
        11: _Field("events", "message", "event", True),
        15: _Field("status", "message", "status"),
    },
    "event": {
        1: _Field("timeUnixNano", "fixed"),
        2: _Field("name", "text"),
        3: _Field("attributes", "message", "pair", True),
    },
    "status": {2: _Field("message", "text"), 3: _Field("code", "int")},
    "pair": {1: _Field("key", "text"), 2: _Field("value", "message", "value")},
    "value": {
        1: _Field("stringValue", "text"),
        2: _Field("boolValue", "bool"),
        3: _Field("intValue", "int"),
        4: _Field("doubleValue", "double"),
        5: _Field("arrayValue", "message", "array"),
        6: _Field("kvlistValue", "message", "pairs"),
        7: _Field("bytesValue", "hex"),
    },
    "array": {1: _Field("values", "message", "value", True)},
    "pairs": {1: _Field("values", "message", "pair", True)},
}
_WIRE = {
    **dict.fromkeys(("message", "id", "text", "hex"), _BYTES),
    **dict.fromkeys(("int", "bool"), _VARINT),
    **dict.fromkeys(("fixed", "double"), _FIXED64),
}
"""Wire types by the kinds of fields."""


def is_protobuf(path: Path) -> bool:
    """Return whether a file holds requests as Protobuf; raises :class:`DatasetError` if it cannot be read."""
    with opened(path) as file:
        return bool(_framing(file.read(_MOST_HEAD)))


def read_batches(path: Path) -> Iterator[Line] | None:
    """Return the batches of a file of Protobuf, ``None`` for another file.

    Raises:
        DatasetError: From the iterator: the file is cut, or holds another message than a batch of spans.
    """
    return _batches(path) if is_protobuf(path) else None


def _framing(head: bytes) -> str:
    """Return how a file that begins so is framed, ``""`` for one that is no Protobuf.

    A batch begins with 0x0A, the tag of its first field, and what this holds with 0x0A, 0x12 or 0x1A.
    """
    if len(head) > 5 and head[0] < 4 and (head[4:5] == b"\n" or head[4:8] == ZSTD):
        return "prefixed"
    if head[:1] == b"\n":
        is_json = head[1:2] in (b"{", b"[") and head[2:3] == b"\n"
        return "plain" if _is_batch(head) and not is_json else ""
    size, start = _head_varint(head)
    return "delimited" if start and size and _is_batch(head[start:], most=size) else ""


def _is_batch(head: bytes, most: int = MAX_RECORD) -> bool:
    size, start = _head_varint(head[1:])
    inner, end = _head_varint(head[start + 2 :])
    is_field = head[:1] == b"\n" and start > 0 and head[start + 1 : start + 2] in (b"\n", b"\x12", b"\x1a")
    return is_field and end > 0 and inner < size <= most


def _head_varint(head: bytes) -> tuple[int, int]:
    """Return the number at the beginning, and where it ends; ``(0, 0)`` for none."""
    value = 0
    for index, byte in enumerate(head[:5]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, index + 1
    return 0, 0


def _batches(path: Path) -> Iterator[Line]:
    with opened(path) as file:
        head = file.read(_MOST_HEAD)
    framing = _framing(head)
    with opened(path) as file:
        reader, number = _Reader(path, file), 0
        while True:
            number += 1
            place = f"{path}, message {number}"
            data = reader.prefixed(place) if framing == "prefixed" else reader.delimited(place, framing == "plain")
            if data is None:
                return
            try:
                yield _line(place, _unpacked(place, data, framing))
            except _NoBatchError as error:
                raise DatasetError(
                    f"{place} is no batch of spans ({error}), and nothing was imported; the file may be cut, damaged, "
                    "or hold logs or metrics: write the spans once more with an exporter of OTLP"
                ) from error


def _unpacked(place: str, data: bytes, framing: str) -> Json:
    if data.startswith(ZSTD):
        data = unpack_zstd(place, data)
        if data[:1] == b"{":
            try:
                return decoded(data)
            except ValueError as error:
                raise _NoBatchError(str(error)) from error
    if framing == "plain":
        return {"resourceSpans": [_message(memoryview(data), "resource", 1)]}
    return _message(memoryview(data), "batch", 0)


def _line(place: str, value: Json) -> Line:
    return Line(place, value) if is_storable(value) else Line(place, storable(value), is_changed=True)


class _NoBatchError(Exception):
    """A message that is no batch of spans."""


class _Reader:
    """Reads messages of a file one after the other."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file = path, file

    def prefixed(self, place: str) -> bytes | None:
        """Return the next message with a length of four bytes, ``None`` at the end."""
        head = self._file.read(4)
        if not head:
            return None
        return self._exactly(place, int.from_bytes(head, "big") if len(head) == 4 else MAX_RECORD)

    def delimited(self, place: str, has_tag: bool) -> bytes | None:
        """Return the next message with its length as a varint, and perhaps a tag, before it; ``None`` at the end."""
        byte = self._file.read(1)
        if not byte:
            return None
        if has_tag:
            if byte != b"\n":
                raise DatasetError(
                    f"{place} begins with {byte!r} and not as a batch of spans does, and nothing was imported; write "
                    "the spans once more with an exporter of OTLP"
                )
            byte = self._file.read(1)
        size = shift = 0
        while byte and byte[0] >= 0x80 and shift < 28:
            size |= (byte[0] & 0x7F) << shift
            byte, shift = self._file.read(1), shift + 7
        return self._exactly(place, size | byte[0] << shift if byte else MAX_RECORD)

    def _exactly(self, place: str, size: int) -> bytes:
        if size > MAX_RECORD:
            raise DatasetError(
                f"{place} has more than {MAX_RECORD >> 20} MiB, and nothing was imported; write smaller batches"
            )
        data = self._file.read(size)
        if len(data) < size:
            raise DatasetError(
                f"{self._path} ends in the middle of {place.rpartition(', ')[2]}, and nothing was imported; it may be "
                "cut, or still be written: copy it once more, or import it once it is complete"
            )
        return data


def _message(data: memoryview, name: str, depth: int) -> dict[str, Any]:
    """Decode a message; fields that are not in the table are passed over."""
    if depth > _DEEPEST:
        raise _NoBatchError("it is nested too deeply")
    fields = _MESSAGES[name]
    found: dict[str, Any] = {}
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        field, wire = fields.get(tag >> 3), tag & 7
        if field is not None and wire != _WIRE[field.kind]:
            raise _NoBatchError(f"its {field.name} is of another type")
        value, at = _raw(data, at, wire)
        if field is None:
            continue
        decoded_value = _value(value, field, depth)
        if field.is_list:
            found.setdefault(field.name, []).append(decoded_value)
        else:
            found[field.name] = decoded_value
    return found


def _raw(data: memoryview, at: int, wire: int) -> tuple[Any, int]:
    if wire == _VARINT:
        return _varint(data, at)
    size = {_FIXED64: 8, _FIXED32: 4}.get(wire)
    if wire == _BYTES:
        size, at = _varint(data, at)
    if size is None:
        raise _NoBatchError("it has a field of no known type")
    if at + size > len(data):
        raise _NoBatchError("a field goes beyond its end")
    return data[at : at + size], at + size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value & ((1 << 64) - 1), at
    raise _NoBatchError("a number goes beyond its end")


def _value(value: Any, field: _Field, depth: int) -> Any:
    match field.kind:
        case "message":
            return _message(value, field.message, depth + 1)
        case "id" | "hex":
            return bytes(value).hex()
        case "text":
            return bytes(value).decode("utf-8", "replace")
        case "bool":
            return bool(value)
        case "int":
            return value - (1 << 64) if value >> 63 else value
        case "double":
            number = struct.unpack("<d", value)[0]
            return number if math.isfinite(number) else str(number)
        case _:
            return int.from_bytes(value, "little")
