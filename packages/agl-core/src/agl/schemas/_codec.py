"""Encodes and decodes records: msgpack for stores and agl's own connections, JSON for people and foreign programs.

Packed ids travel as raw bytes in msgpack and as base64 in JSON. Unknown fields are ignored on reading, so that an
older reader accepts a newer writer's records.
"""

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

# Made once; an encoder keeps its buffer.
_ENCODER = msgspec.msgpack.Encoder()
_JSON = msgspec.json.Encoder()


def encode(value: Any) -> bytes:
    """Encode a value as msgpack."""
    return _ENCODER.encode(value)


def decode(data: bytes | bytearray | memoryview, type: type[T]) -> T:
    """Decode msgpack to a value of ``type``; raises :class:`msgspec.ValidationError` if the data does not fit."""
    return msgspec.msgpack.decode(data, type=type)


def to_json(value: Any) -> bytes:
    """Encode a value as compact JSON."""
    return _JSON.encode(value)


def from_json(data: bytes | str, type: type[T]) -> T:
    """Decode JSON to a value of ``type``."""
    return msgspec.json.decode(data, type=type)


def to_builtins(value: Any) -> Any:
    """Convert a value to dicts, lists and scalars, with bytes as base64 text."""
    return msgspec.to_builtins(value)
