"""Spans for models that bypass the wire hook and that the SDK reports by no span of its own.

Each call of the SDK's own models is in a span of kind ``generation`` or ``response``; a program's implementation of
``Model`` need not make one. Every such class is watched, including those defined later. A call that the wire hook
saw, or that a span of the SDK reports, gets no span here.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from agents import Model

from agl.tracing import OpenSpan, Undo, current, open_span, patch_subclasses, stepped
from agl_openai_agents._convert import class_name


def watch_models() -> Undo:
    """Watch the classes; the returned function restores the originals."""
    return patch_subclasses(Model, {"get_response": _watched, "stream_response": _watched_stream}, besides="agents")


def _open(model: Model, *, is_current: bool) -> OpenSpan:
    name = str(getattr(model, "model", ""))
    return open_span(client=class_name(model), model=name, unless_called=True, is_current=is_current)


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    async def get_response(self: Model, *args: Any, **options: Any) -> Any:
        if current() is None:
            return await original(self, *args, **options)
        with _open(self, is_current=True):
            return await original(self, *args, **options)

    return get_response


def _watched_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def stream_response(self: Model, *args: Any, **options: Any) -> Any:
        items = original(self, *args, **options)
        return items if current() is None else stepped(lambda: _open(self, is_current=False), items)

    return stream_response
