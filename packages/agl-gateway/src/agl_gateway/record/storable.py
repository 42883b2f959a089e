"""Makes recorded calls storable: values that no store can hold are replaced, and the call's ``error`` names them."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from agl.schemas import Span, encode

_FREE = frozenset({"request", "response", "attributes"})
"""Fields of a span that hold arbitrary JSON; in them, a number may be replaced by text."""

_MAX = 2**63 - 1
_MAX_DEPTH = 200
_MAX_NAMED = 5
_MAX_PATH = 80


def storable(span: Span) -> Span:
    """Return the span, or a copy with replaced values if a store cannot hold it.

    Integers beyond 64 bits become text in JSON, and the nearest 64-bit integer elsewhere. Lone surrogates become
    escapes, and JSON below 200 levels becomes a remark. The call's ``error`` names the replaced values, so the call
    does not train.
    """
    try:
        encode(span)
    except (TypeError, ValueError, OverflowError, RecursionError):
        fitter = _Fitter()
        kept = msgspec.convert(fitter.fit(_fields(span), ""), Span, builtin_types=(bytes,))
        return _marked(kept, f"values were replaced that a store cannot keep: {fitter.named}")
    return span


def _fields(record: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


def _marked(span: Span, text: str) -> Span:
    call = span.call
    if call is None:
        return span
    return replace(span, call=replace(call, error=f"{call.error}; {text}" if call.error else text))


class _Fitter:
    """Copies values in the form that a store can hold, and records the paths of the values that it replaces."""

    def __init__(self) -> None:
        self._paths: list[str] = []

    @property
    def named(self) -> str:
        """The paths of the first five replaced values, and how many more there are."""
        shown = [path if len(path) <= _MAX_PATH else f"{path[:_MAX_PATH]}..." for path in self._paths[:_MAX_NAMED]]
        more = len(self._paths) - len(shown)
        return ", ".join(shown) + (f" and {more} more" if more else "")

    def fit(self, value: Any, path: str, *, depth: int = 0, is_free: bool = False) -> Any:
        """Return a copy of ``value`` that a store can hold; the path of each replaced value is recorded."""
        if isinstance(value, msgspec.Struct):
            value = _fields(value)
        if isinstance(value, str):
            return self._noted(path, value, _whole(value))
        if isinstance(value, int) and not isinstance(value, bool):
            return self._noted(path, value, _bounded(value, is_free=is_free))
        if not isinstance(value, Mapping | list | tuple):
            return value
        if depth > _MAX_DEPTH:
            return self._noted(path, None, "nested too deep")
        if isinstance(value, Mapping):
            return self._mapping(cast("Mapping[str, Any]", value), path, depth + 1, is_free)
        parts = enumerate(cast("Sequence[Any]", value))
        return [self.fit(each, f"{path}[{at}]", depth=depth + 1, is_free=is_free) for at, each in parts]

    def _mapping(self, value: Mapping[str, Any], path: str, depth: int, is_free: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, each in value.items():
            below = f"{path}.{_whole(key)}" if path else key
            name = self._noted(below, key, _whole(key))
            found[name] = self.fit(each, below, depth=depth, is_free=is_free or key in _FREE)
        return found

    def _noted(self, path: str, before: Any, after: Any) -> Any:
        if before != after:
            self._paths.append(path)
        return after


def _whole(text: str) -> str:
    """Return the text with lone surrogates replaced by escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _bounded(number: int, *, is_free: bool) -> int | str:
    """Return the number if it fits into 64 bits; else its text if ``is_free``, or the nearest 64-bit integer."""
    nearest = max(-_MAX - 1, min(number, _MAX))
    return str(number) if is_free and nearest != number else nearest
