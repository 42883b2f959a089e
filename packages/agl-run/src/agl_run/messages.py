"""Prompts of several messages in the form that agents get: a list for OpenAI's clients, with placeholders to fill.

The resource is plain JSON, ``[{"role": "system", "content": "..."}, {"role": "user", "content": "{question}"}]``.
Algorithms that tune such a prompt preserve its roles and placeholders; this module only fills the placeholders.
"""

from typing import Any, cast

from agl.schemas import Json, JsonResource, PromptTemplate, Resource

_ROLES = frozenset({"system", "developer", "user", "assistant"})


class Messages(list[dict[str, str]]):
    """The messages of a prompt, each with its ``role`` and ``content``.

    This is an ordinary list of dictionaries with the method :meth:`format`. Agents get it in place of any JSON
    resource that has this form.
    """

    def format(self, **values: object) -> "Messages":
        """Fill the placeholders ``{name}`` of all messages; raises :class:`ConfigError` if a placeholder has no value.

        Literal braces are written as ``{{`` and ``}}``. Values that no message uses are ignored.
        """
        return Messages(
            {"role": one["role"], "content": PromptTemplate(template=one["content"]).format(**values)} for one in self
        )


def value_for_agent(resource: Resource) -> Any:
    """Return a resource in the form that agents get: the value of a JSON resource, with prompts as ``Messages``."""
    if not isinstance(resource, JsonResource):
        return resource
    return Messages(cast("list[dict[str, str]]", resource.value)) if _is_messages(resource.value) else resource.value


def resource_for_child(value: Any) -> Resource:
    """Return the resource from which :func:`value_for_agent` makes this value, to send it to a child process."""
    return value if isinstance(value, Resource) else JsonResource(value=value)


def _is_messages(value: Json) -> bool:
    given = cast("list[Any]", value) if isinstance(value, list) else []
    return bool(given) and all(map(_is_message, given))


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or cast("dict[str, Any]", value).keys() != {"role", "content"}:
        return False
    return value["role"] in _ROLES and isinstance(value["content"], str)
