"""Assembles the tool calls of a streamed answer."""

from typing import Any

import msgspec

from agl.dialects._foreign import as_dict, dicts_in
from agl.schemas import Json


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
