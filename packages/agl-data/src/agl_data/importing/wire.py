"""Reads OTLP in Protobuf and converts it to OTLP's JSON form; OpenTelemetry's library decodes each request.

A file has one of three framings. It is plain if it holds one or more requests as an HTTP exporter sends them. It is
delimited if a varint with the length precedes each request, as in OTLP's file format. It is prefixed if a length of
four bytes precedes each request, as the collector's file exporter writes it; each request may be compressed with zstd.
"""

import importlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from agl.errors import DatasetError
from agl.schemas import Json
from agl_data.importing.source import MAX_RECORD, ZSTD, Line, decoded, line_of, opened, unpacking

_MOST_HEAD = 16
"""Number of bytes at the start of a file that show its framing: lengths, tags, and the first field."""


def is_protobuf(path: Path) -> bool:
    """Return whether a file holds requests in Protobuf; raises :class:`DatasetError` if it cannot be read."""
    with opened(path) as file:
        return bool(_framing(file.read(_MOST_HEAD)))


def read_batches(path: Path) -> Iterator[Line] | None:
    """Return the batches of spans in a Protobuf file; ``None`` if the file is not Protobuf.

    Raises:
        DatasetError: The file cannot be read. The iterator raises it if the file is truncated, or holds a message that
            is not a batch of spans.
    """
    return _batches(path) if is_protobuf(path) else None


def _framing(head: bytes) -> str:
    """Return the framing of a file that starts with ``head``; ``""`` if it is not Protobuf.

    A batch begins with 0x0A, the tag of its first field, whose content begins with 0x0A, 0x12 or 0x1A.
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
    """Decode the varint at the start of ``head``; return its value and length in bytes, ``(0, 0)`` if it is invalid."""
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
                yield line_of(place, _unpacked(place, data, framing))
            except _NoBatchError as error:
                raise DatasetError(
                    f"{place} is not a batch of spans ({error}), and nothing was imported; the file may be cut, "
                    "damaged, or hold logs or metrics: write the spans once more with an exporter of OTLP"
                ) from error


def _unpacked(place: str, data: bytes, framing: str) -> Json:
    if data.startswith(ZSTD):
        with unpacking(place, io.BytesIO(data)) as packed:
            data = packed.read(MAX_RECORD + 1)
        if len(data) > MAX_RECORD:
            raise _too_large(place)
        if data[:1] == b"{":
            try:
                return decoded(data)
            except ValueError as error:
                raise _NoBatchError(str(error)) from error
    return _requests(place, b"\n" + _varint(len(data)) + data if framing == "plain" else data)


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + _varint(value >> 7)


class _NoBatchError(Exception):
    """A message is not a batch of spans."""


class _Reader:
    """Reads the messages of a file one at a time."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file = path, file

    def prefixed(self, place: str) -> bytes | None:
        """Return the next message after its length in four bytes; ``None`` at the end of the file."""
        head = self._file.read(4)
        if not head:
            return None
        return self._exactly(place, int.from_bytes(head, "big") if len(head) == 4 else MAX_RECORD)

    def delimited(self, place: str, has_tag: bool) -> bytes | None:
        """Return the next message, or ``None`` at the end of the file.

        Before the message come, if ``has_tag``, a tag, and then a varint with the message's length.
        """
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
            raise _too_large(place)
        data = self._file.read(size)
        if len(data) < size:
            raise DatasetError(
                f"{self._path} ends in the middle of {place.rpartition(', ')[2]}, and nothing was imported; it may be "
                "cut, or still be written: copy it once more, or import it once it is complete"
            )
        return data


def _too_large(place: str) -> DatasetError:
    return DatasetError(
        f"{place} has more than {MAX_RECORD >> 20} MiB, and nothing was imported; write smaller batches"
    )


def _requests(place: str, data: bytes) -> Json:
    """Decode a request to OTLP's JSON form, with ids in base64."""
    try:
        service: Any = importlib.import_module("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        json_format: Any = importlib.import_module("google.protobuf.json_format")
        protobuf: Any = importlib.import_module("google.protobuf.message")
    except ImportError as error:
        raise DatasetError(
            f"{place} is Protobuf, which takes one more package; install it with pip install 'agl-data[otlp]', or "
            "write the spans as JSON"
        ) from error
    try:
        request = service.ExportTraceServiceRequest.FromString(data)
        value = json_format.MessageToDict(request, use_integers_for_enums=True)
    except protobuf.DecodeError as error:
        raise _NoBatchError("it is damaged or nested too deeply") from error
    spans = (span for group in request.resource_spans for scope in group.scope_spans for span in scope.spans)
    if not all(span.trace_id for span in spans):
        raise _NoBatchError("it has records without the id of a trace")
    return value
