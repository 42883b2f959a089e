"""Finds the conversation of a model call that carries no attempt's token.

Its id is, in this order:

1. the header ``x-agl-conversation-id``;
2. ``metadata.conversation_id`` in the body;
3. the session that a coding agent names in a header of its own;
4. a hash of the conversation's opening: its system prompt and everything up to its first user message. Conversations
   with the same opening are treated as one. Claude Code's billing line, which changes from call to call, is no part of
   the opening.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, cast

import msgspec

from agl.dialects import Request
from agl_gateway.wire.problems import Problem
from agl_gateway.wire.translation import as_object

HEADER = "x-agl-conversation-id"

_FIELD = "conversation_id"
_MAX_ID = 512
_BILLING = "x-anthropic-billing-header:"


def conversation_of(headers: Mapping[str, str], call: Request, *, session: str = "") -> str:
    """Return the id of a call's conversation, by the rule in the module's docstring.

    Args:
        session: The coding agent's session; ``""`` for other clients.

    Raises:
        Problem: 400 if the call has neither an id nor an opening, or the id is too long.
    """
    if given := conversation_id(headers, call.get("metadata")):
        return given
    if session:
        return f"session-{session}"
    opening = opening_of(call)
    if opening is None:
        raise Problem(
            400,
            "the call names no conversation, and has no first user message to derive one from; "
            f"send the header {HEADER}, or {_FIELD} in the body's metadata",
            code="conversation_unknown",
        )
    return f"opening-{blake2b(msgspec.json.encode(opening, order='sorted'), digest_size=16).hexdigest()}"


def conversation_id(headers: Mapping[str, str], metadata: object = None) -> str:
    """Return the id that the client sent in a header or in the body's ``metadata``; ``""`` if it sent none.

    Raises:
        Problem: 400 if it is too long, or no text in UTF-8.
    """
    found = as_object(metadata).get(_FIELD)
    given = headers.get(HEADER, "") or (found if isinstance(found, str) else "")
    if len(given) > _MAX_ID:
        raise Problem(400, f"the conversation's id has {len(given)} characters; {_MAX_ID} are allowed")
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise Problem(400, f"the conversation's id {given!a} is not UTF-8 text; send letters and digits") from error
    return given


def opening_of(call: Request) -> list[Any] | None:
    """Return the system prompt and the messages up to the user's first; ``None`` if there is none."""
    is_response = call.dialect == "responses"
    if call.dialect not in ("chat", "messages", "responses") or call.get("previous_response_id"):
        return None
    system = _without_billing(call.get("instructions" if is_response else "system"))
    messages = call.get("input" if is_response else "messages")
    if isinstance(messages, str):
        return [system, messages]
    for index, message in enumerate(_items(messages)):
        if as_object(message).get("role") == "user":
            return [system, *_items(messages)[: index + 1]]
    return None


def _without_billing(system: Any) -> Any:
    """Return the system prompt without the block in which Claude Code counts its use."""
    if not isinstance(system, list):
        return system
    return [block for block in _items(system) if not str(as_object(block).get("text", "")).startswith(_BILLING)]


def _items(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []
