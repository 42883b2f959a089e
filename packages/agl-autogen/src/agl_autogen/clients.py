"""Spans for model clients that bypass the wire hook; AutoGen makes none for a model call.

Every class of model clients is watched, including those defined later. A call that the wire hook saw gets no span
here.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from autogen_core.models import ChatCompletionClient

from agl.tracing import OpenSpan, Undo, current, open_span, patch_subclasses, stepped
from agl_autogen import _convert


def install() -> list[Undo]:
    """Watch the clients; the returned functions restore the originals."""
    return [patch_subclasses(ChatCompletionClient, {"create": _watched, "create_stream": _watched_stream})]


def _open(client: Any, *, is_current: bool) -> OpenSpan:
    return open_span(client=_convert.client_name(client), unless_called=True, is_current=is_current)


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    async def create(self: Any, *args: Any, **options: Any) -> Any:
        if current() is None:
            return await original(self, *args, **options)
        with _open(self, is_current=True):
            return await original(self, *args, **options)

    return create


def _watched_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def create_stream(self: Any, *args: Any, **options: Any) -> Any:
        return stepped(lambda: _open(self, is_current=False), original(self, *args, **options))

    return create_stream
