"""Prompts of several messages, as agents get them: a list that OpenAI's clients take, with placeholders to fill.

The resource is plain JSON, ``[{"role": "system", "content": "..."}, {"role": "user", "content": "{question}"}]``.
Optimisers that tune one keep its roles and placeholders; filling it in is all that is left to do here.
"""

from typing import Any, cast

from agl.schemas import Json, JsonResource, PromptTemplate, Resource

_ROLES = frozenset({"system", "developer", "user", "assistant"})


class Messages(list[dict[str, str]]):
    """The messages of a prompt, each with its ``role`` and ``content``.

    It is a list of dictionaries like any other, and where a resource's value is one, agents get it as this class.
    """

    def format(self, **values: object) -> "Messages":
        """Fill the placeholders ``{name}`` of all messages; raises :class:`ConfigError` naming those without a value.

        Literal braces are written as ``{{`` and ``}}``. A value may be used in any message, in several, or in none.
        """
        return Messages(
            {"role": one["role"], "content": PromptTemplate(template=one["content"]).format(**values)} for one in self
        )


def value_for_agent(resource: Resource) -> Any:
    """Return a resource as agents get it: JSON as its value, messages with a way to fill them."""
    if not isinstance(resource, JsonResource):
        return resource
    return Messages(cast("list[dict[str, str]]", resource.value)) if _is_messages(resource.value) else resource.value


def resource_for_child(value: Any) -> Resource:
    """Return the resource of which :func:`value_for_agent` makes this value, to send it to another process."""
    return value if isinstance(value, Resource) else JsonResource(value=value)


def _is_messages(value: Json) -> bool:
    given = cast("list[Any]", value) if isinstance(value, list) else []
    return bool(given) and all(map(_is_message, given))


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or cast("dict[str, Any]", value).keys() != {"role", "content"}:
        return False
    return value["role"] in _ROLES and isinstance(value["content"], str)
