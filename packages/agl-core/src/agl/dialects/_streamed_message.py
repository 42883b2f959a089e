"""Assembles the message of a streamed chat completion, and its tool calls."""

from typing import Any

import msgspec

from agl.dialects._foreign import as_dict, as_text, dicts_in, is_list
from agl.schemas import Json

# Fields of an entry that arrive in several parts, and the field that ends such an entry.
_GROWING = ("text", "summary", "thinking")
_SIGNATURE = "signature"
_IDENTITY = ("type", "index", "id", _SIGNATURE)
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
        self._lists: dict[str, _Entries] = {}
        self._fields: dict[str, Json] = {}
        self._calls = StreamedCalls()

    def add(self, delta: dict[str, Any]) -> None:
        """Add a delta, or a whole message."""
        for key, value in delta.items():
            if key == "tool_calls":
                self._calls.add(value)
            elif is_list(value) or (isinstance(value, str) and key in self._lists):
                self._entries(key).add(_listed(value))
            elif isinstance(value, str) and key != "role":
                self._texts.setdefault(key, []).append(value)
            elif value is not None:
                self._fields[key] = value

    def whole(self) -> dict[str, Any]:
        """The fields so far, in the form of a plain message."""
        texts = {key: "".join(parts) for key, parts in self._texts.items()}
        lists = {key: entries.whole() for key, entries in self._lists.items()}
        calls = self._calls.whole()
        return {**self._fields, **texts, **lists, **({"tool_calls": calls} if calls else {})}

    def _entries(self, key: str) -> "_Entries":
        """The entries of a list; they begin with the text that arrived as a plain string before."""
        if key not in self._lists:
            self._lists[key] = _Entries()
            self._lists[key].add(_listed("".join(self._texts.pop(key, ()))))
        return self._lists[key]


class _Entries:
    """The entries of a list, each of which may arrive in several parts."""

    def __init__(self) -> None:
        # The fields that identify each entry, and its parts: they are joined at the end, as joining copies them.
        self._entries: list[tuple[dict[str, Any], list[Any]]] = []

    def add(self, parts: list[Any]) -> None:
        """Add the parts of one delta to the entries that they continue, or as new entries."""
        # Parts that arrive together never continue each other: a plain body has all entries in one list.
        near = self._entries[: -_NEAR - 1 : -1]
        for part in parts:
            given = {key: value for key, value in as_dict(part).items() if key in _IDENTITY and value is not None}
            head, known = next(
                (one for one in near if _continues(one[0], as_dict(part))), (dict[str, Any](), list[Any]())
            )
            if not known:
                self._entries.append((head, known))
            head |= given
            known.append(part)

    def whole(self) -> list[Any]:
        return [parts[0] if len(parts) == 1 else _joined(parts) for _, parts in self._entries]


def _continues(head: dict[str, Any], part: dict[str, Any]) -> bool:
    """True if ``part`` has more text of the entry with the fields ``head``, or its signature."""
    is_part = not head.get(_SIGNATURE) and not part.keys().isdisjoint((*_GROWING, _SIGNATURE))
    is_same = all(head.get(key) == part.get(key) for key in ("type", "index"))
    return is_part and is_same and part.get("id") in (None, head.get("id"))


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    found = {**parts[0]}
    for part in parts[1:]:
        found |= {key: value for key, value in part.items() if value is not None}
    for key in _GROWING:
        values = [part[key] for part in parts if isinstance(part.get(key), str | list)]
        if all(isinstance(value, str) for value in values):
            found |= {key: "".join(values)} if values else {}
        else:
            found[key] = _with_texts_joined([entry for value in values for entry in _listed(value)])
    return found


def _with_texts_joined(entries: list[Any]) -> list[Any]:
    """Return the entries as one, if all of them are plain texts."""
    texts = [as_text(as_dict(entry).get("text")) for entry in entries if as_dict(entry).keys() == {"type", "text"}]
    return _listed("".join(texts)) if len(texts) == len(entries) else entries


def _listed(value: str | list[Any]) -> list[Any]:
    """Return a list as it is, and a text as a list with one entry."""
    if isinstance(value, list):
        return value
    return [{"type": "text", "text": value}] if value else []


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
        calls = [call for _, call in sorted(self._calls, key=lambda one: one[0])]
        return [{**call, "function": {**call["function"], "arguments": _arguments(call)}} for call in calls]

    def _add(self, part: dict[str, Any]) -> None:
        given, index = as_dict(part.get("function")), part.get("index")
        at = index if isinstance(index, int) else None
        call = self._newest.get(at)
        if call is None or _opens_another(call, part.get("id"), given.get("name")):
            call = self._newest[at] = {"function": {"name": "", "arguments": list[str]()}}
            self._calls.append((len(self._calls) if at is None else at, call))
        function = call["function"]
        # Some servers repeat the name with every part.
        if isinstance(name := given.get("name"), str) and name != function["name"]:
            function["name"] += name
        if isinstance(arguments := given.get("arguments"), str):
            function["arguments"].append(arguments)
        call.update({key: value for key, value in part.items() if key not in ("index", "function") and value})


def _opens_another(call: dict[str, Any], call_id: object, name: object) -> bool:
    """True if a part with this id and name begins another call, although its index is that of ``call``."""
    if call_id and call.get("id"):
        return call_id != call["id"]
    return bool(name and call["function"]["name"]) and _is_complete(_arguments(call))


def _arguments(call: dict[str, Any]) -> str:
    return "".join(call["function"]["arguments"])


def _is_complete(arguments: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(arguments.encode()), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
