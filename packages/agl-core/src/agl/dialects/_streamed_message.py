"""Assembles the message of a streamed chat completion, and its tool calls."""

from typing import Any

import msgspec

from agl.dialects._foreign import as_dict, as_list, dicts_in, is_list
from agl.schemas import Json

# Fields of an entry that arrive in several parts, and the field that ends such an entry.
_GROWING = ("text", "summary", "thinking")
_SIGNATURE = "signature"
# How many of the last entries a part may continue; without a limit, a hostile stream would take quadratic time.
_NEAR = 8


class StreamedMessage:
    """Assembles one message from its deltas, or from parts of the message.

    Texts are joined, and tool calls are assembled by :class:`StreamedCalls`. Parts of an entry in a list, such as
    OpenRouter's ``reasoning_details``, are joined if they have the same type and index. Of any other field the last
    value counts.
    """

    def __init__(self) -> None:
        # Lists of parts, joined at the end: adding strings one by one may copy the text each time.
        self._texts: dict[str, list[str]] = {}
        self._lists: dict[str, list[Any]] = {}
        self._fields: dict[str, Json] = {}
        self._calls = StreamedCalls()

    def add(self, delta: dict[str, Any]) -> None:
        """Add a delta, or a whole message."""
        for key, value in delta.items():
            if key == "tool_calls":
                self._calls.add(value)
            elif isinstance(value, str) and key in self._lists:
                _extend(self._lists[key], [{"type": "text", "text": value}])  # Mistral's content after its thoughts
            elif isinstance(value, str) and key != "role":
                self._texts.setdefault(key, []).append(value)
            elif is_list(value):
                _extend(self._lists.setdefault(key, []), as_list(value))
            elif value is not None:
                self._fields[key] = value

    def whole(self) -> dict[str, Any]:
        """The fields so far, in the form of a plain message."""
        texts = {key: "".join(parts) for key, parts in self._texts.items()}
        calls = self._calls.whole()
        return {**self._fields, **texts, **self._lists, **({"tool_calls": calls} if calls else {})}


def _extend(entries: list[Any], parts: list[Any]) -> None:
    """Add the parts of one delta to the entries that they continue, or as new entries."""
    known = len(entries)
    for part in parts:
        # Parts that arrive together never continue each other: a plain body has all entries in one list.
        for at in range(known - 1, max(-1, known - 1 - _NEAR), -1):
            if _continues(as_dict(entries[at]), as_dict(part)):
                entries[at] = _longer(entries[at], part)
                break
        else:
            entries.append(part)


def _continues(entry: dict[str, Any], part: dict[str, Any]) -> bool:
    """True if ``part`` has more text of ``entry``, or its signature."""
    is_part = not entry.get(_SIGNATURE) and not part.keys().isdisjoint((*_GROWING, _SIGNATURE))
    is_same = all(entry.get(key) == part.get(key) for key in ("type", "index"))
    return is_part and is_same and part.get("id") in (None, entry.get("id"))


def _longer(entry: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    found = {**entry, **{key: value for key, value in part.items() if value is not None}}
    for key in _GROWING:
        if isinstance(part.get(key), str):
            found[key] = f"{entry.get(key) or ''}{part[key]}"
        elif is_list(part.get(key)):
            found[key] = [*as_list(entry.get(key))]
            _extend(found[key], part[key])
    return found


class StreamedCalls:
    """Assembles the tool calls of one message from parts that arrive in any order.

    Parts with the same index belong to one call. Some servers give all parallel calls the same index, or no index.
    There a new id starts a new call, and so does a function name after a call whose arguments are complete.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[int, dict[str, Any]]] = []
        # The newest call at each index, None for parts that have no index.
        self._newest: dict[int | None, dict[str, Any]] = {}

    def add(self, parts: Json) -> None:
        """Add the ``tool_calls`` of a delta, or of a whole message."""
        for part in dicts_in(parts):
            self._add(part)

    def whole(self) -> list[dict[str, Any]]:
        """The tool calls so far, sorted by index, in the form of a plain message."""
        return [call for _, call in sorted(self._calls, key=lambda one: one[0])]

    def _add(self, part: dict[str, Any]) -> None:
        given, index = as_dict(part.get("function")), part.get("index")
        at = index if isinstance(index, int) else None
        call = self._newest.get(at)
        if call is None or _opens_another(call, part.get("id"), given.get("name")):
            call = self._newest[at] = {"function": {"name": "", "arguments": ""}}
            self._calls.append((len(self._calls) if at is None else at, call))
        function = call["function"]
        # Some servers repeat the name with every part.
        if isinstance(name := given.get("name"), str) and name != function["name"]:
            function["name"] += name
        if isinstance(arguments := given.get("arguments"), str):
            function["arguments"] += arguments
        call.update({key: value for key, value in part.items() if key not in ("index", "function") and value})


def _opens_another(call: dict[str, Any], call_id: object, name: object) -> bool:
    """True if a part with this id and name begins another call, although its index is that of ``call``."""
    if call_id and call.get("id"):
        return call_id != call["id"]
    return bool(name and call["function"]["name"]) and _is_complete(call["function"]["arguments"])


def _is_complete(arguments: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(arguments.encode()), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
