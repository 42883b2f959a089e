"""The tools of a request, in the form of OpenAI's chat."""

from collections.abc import Mapping
from typing import Any, TypeGuard

from agl.schemas import ModelCall


def chat_tools(call: ModelCall) -> list[Any]:
    """Return the tools of a request of any dialect in chat's form, without those that only a server runs."""
    found = call.request.get("tools") if _is_object(call.request) else None
    given = [tool for tool in found if _is_object(tool)] if isinstance(found, list) else []  # pyright: ignore[reportUnknownVariableType]  # any JSON
    if call.dialect == "chat":
        return given
    return [_function(tool) for tool in given if "name" in tool]


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": tool["name"], "description": tool.get("description", "")}
    fields["parameters"] = tool.get("parameters") or tool.get("input_schema") or {"type": "object"}
    return {"type": "function", "function": fields}


def _is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)
