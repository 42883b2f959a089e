"""Prompts of several messages as one text, which editors, merges and checks handle like any other text.

The resource is the JSON that OpenAI's clients take, a list of ``{"role": ..., "content": ...}``. Its text is a document
in which a line with the role precedes each message:

    === system ===
    You are the clerk.
    === user ===
    Complete the order: {order}

The agent's code depends on the roles and their order, so they must stay. So must the placeholders of each message,
which are written as in f-strings.
"""

import re
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

from agl.errors import ConfigError
from agl.schemas import Json, JsonResource, PromptTemplate, Resource

ROLES = ("system", "developer", "user", "assistant")
"""The roles that a message may have."""

MARK = "==="
"""The text at the start and end of the line before each message."""

_HEAD = re.compile(r"^=== (\w+) ===$", re.MULTILINE)

Message: TypeAlias = tuple[str, str]
"""A message as (role, text)."""


def messages_of(resource: Resource) -> list[Message]:
    """Return the messages of a prompt; empty for a resource that is not a list of messages."""
    value = resource.value if isinstance(resource, JsonResource) else None
    found = _pairs(value)
    return found if all(role in ROLES for role, _ in found) else []


def check_messages(name: str, resource: Resource) -> None:
    """Raise :class:`ConfigError` if a resource that looks like messages has a wrong role or text."""
    found = _pairs(resource.value) if isinstance(resource, JsonResource) else []
    for number, (role, content) in enumerate(found, start=1):
        if role not in ROLES:
            raise ConfigError(
                f"message {number} of the prompt {name!r} has the role {role!r}, and the roles are {', '.join(ROLES)}; "
                "correct it"
            )
        if head := _HEAD.search(content):
            raise ConfigError(
                f"message {number} of the prompt {name!r} has the line {head[0]!r}, by which apo tells messages apart; "
                "change that line"
            )


def document_of(messages: Sequence[Message]) -> str:
    """Return messages as one document."""
    return "\n".join(f"=== {role} ===\n{content}" for role, content in messages)


def read_document(text: str) -> JsonResource:
    """Return the messages in a document as a resource; raises :class:`ValueError` if it does not start with a role."""
    heads = list(_HEAD.finditer(text))
    if not heads or text[: heads[0].start()].strip():
        raise ValueError("it does not start with a line that names a role, such as '=== system ==='")
    ends = [*(head.start() - 1 for head in heads[1:]), len(text)]
    pairs = [(head[1], text[head.end() + 1 : end]) for head, end in zip(heads, ends, strict=True)]
    return JsonResource(value=[{"role": role, "content": content} for role, content in pairs])


def changed_messages(resource: Resource, seed: Resource) -> str:
    """Return how messages differ from the first version in a forbidden way; ``""`` if they do not.

    Raises :class:`ValueError` for a message that cannot be parsed.
    """
    new, old = _pairs(cast("JsonResource", resource).value), messages_of(seed)
    roles, before = [role for role, _ in new], [role for role, _ in old]
    if roles != before:
        return f"the text has messages of {roles}, and the first version of {before}: the roles and their order stay"
    for number, ((role, content), (_, first)) in enumerate(zip(new, old, strict=True), start=1):
        kept, had = (PromptTemplate(template=each).fields for each in (content, first))
        if kept != had:
            return f"message {number} ({role}) has the placeholders {sorted(kept)}, and {sorted(had)} must stay"
    return ""


def _pairs(value: Json) -> list[Message]:
    """Return a list of role-and-content objects as messages; empty for any other value."""
    given = cast("list[Any]", value) if isinstance(value, list) else []
    is_text = [isinstance(one, dict) and one.keys() == {"role", "content"} for one in given]
    pairs = [(one["role"], one["content"]) for one in given] if all(is_text) else []
    return pairs if all(isinstance(part, str) for pair in pairs for part in pair) else []
