"""Attribute values as OTLP carries them."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from agl.schemas import to_json

_INT64 = 1 << 63


def key_values(attributes: Mapping[str, Any]) -> Iterator[KeyValue]:
    """Convert attributes; leaves out those that are ``None`` or empty texts and lists."""
    for key, value in attributes.items():
        if value is not None and value != "" and value != [] and value != ():
            yield KeyValue(key=_text(key), value=_any(value))


def as_text(value: Any) -> str:
    """Return a text as it is, and any other JSON value as JSON."""
    return value if isinstance(value, str) else to_json(value).decode()


def _any(value: Any) -> AnyValue:
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case int() if -_INT64 <= value < _INT64:
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case list() | tuple() if all(isinstance(item, str) for item in cast("list[Any]", value)):
            made = AnyValue()
            made.array_value.values.extend(_any(item) for item in cast("list[str]", value))
            return made
        case _:
            return AnyValue(string_value=_text(as_text(value)))


def _text(value: str) -> str:
    """Return the text without halves of characters, which UTF-8 cannot hold."""
    return value.encode("utf-8", "replace").decode()
