"""Spans for model clients that bypass the wire hook; AutoGen makes none for a model call.

Every class of model clients is watched, including those defined later. A call that the wire hook saw gets no span
here.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from autogen_core.models import ChatCompletionClient

from agl.tracing import OpenSpan, Undo, current, open_span, patch
from agl_autogen import _convert
from agl_autogen.streams import stepped


def install() -> list[Undo]:
    """Watch the clients; the returned functions, called last to first, restore the originals."""
    undo = [change for kind in _kinds(ChatCompletionClient) for change in _watch(kind)]

    def watch_new(kind: type[ChatCompletionClient], **settings: Any) -> None:
        super(ChatCompletionClient, kind).__init_subclass__(**settings)
        undo.extend(_watch(kind))

    ChatCompletionClient.__init_subclass__ = classmethod(watch_new)  # pyright: ignore[reportAttributeAccessIssue]  # set on the class

    def forget() -> None:
        del ChatCompletionClient.__init_subclass__
        while undo:
            undo.pop()()

    return [forget]


def _kinds(kind: type[Any]) -> Iterator[type[Any]]:
    for each in kind.__subclasses__():
        yield each
        yield from _kinds(each)


def _watch(kind: type[Any]) -> list[Undo]:
    wrappers = {"create": _watched, "create_stream": _watched_stream}
    return [patch(kind, name, wrapper) for name, wrapper in wrappers.items() if name in vars(kind)]


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
