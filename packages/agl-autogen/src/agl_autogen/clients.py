"""Model clients that call past the wire: AutoGen makes no span for a model call, so only these get one, afterwards.

Every class of model clients is watched, those that are defined later too. A call that went over the wire is left
alone, and so is one that failed.
"""

import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import wraps
from typing import Any

from autogen_core.models import ChatCompletionClient

from agl.tracing import Capture, Undo, current, departures, innermost, note_departure, replace
from agl_autogen import _convert

_log = logging.getLogger(__name__)


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
    return [replace(kind, name, wrapper) for name, wrapper in wrappers.items() if name in vars(kind)]


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    async def create(self: Any, *args: Any, **options: Any) -> Any:
        capture = current()
        if capture is None:
            return await original(self, *args, **options)
        start_ns = time.time_ns()
        with departures() as left:
            result = await original(self, *args, **options)
            if not left.count:
                _report(capture, self, start_ns)
        return result

    return create


def _watched_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    async def create_stream(self: Any, *args: Any, **options: Any) -> AsyncGenerator[Any, None]:
        capture, start_ns, count = current(), time.time_ns(), 0
        stream = original(self, *args, **options)
        try:
            while True:
                with departures() as left:
                    try:
                        item = await anext(stream)
                    except StopAsyncIteration:
                        break
                    finally:
                        count += left.count
                yield item
            if capture is not None and not count:
                _report(capture, self, start_ns)
        finally:
            await stream.aclose()

    return create_stream


def _report(capture: Capture, client: Any, start_ns: int) -> None:
    """Record the call that nobody else did, once however many clients stand around one another."""
    note_departure()
    try:
        capture.record(_convert.unseen_call(client, capture, parent_id=innermost(capture), start_ns=start_ns))
    except Exception:  # noqa: BLE001  # isolation point: runs inside the agent's own call
        _log.exception("A model call past the wire could not be described.")
