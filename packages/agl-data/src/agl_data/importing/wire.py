"""OTLP as Protobuf, in the form of its JSON; the library of OpenTelemetry decodes each request.

Files are framed in one of three ways: one request or several as an HTTP exporter sends them, requests that each have
their length as a varint before them, as OTLP's file format says, and requests with a length of four bytes, as the
collector's file exporter writes them, which may compress each one with zstd.
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
"""Bytes by which the framing is recognised: lengths, tags, and the first field."""


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
    """Decode a request into the form of OTLP's JSON, in which ids are in base64."""
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
