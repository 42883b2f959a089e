"""Patches AutoGen while the tracer is installed; outside of a rollout every patch does nothing.

The tracing of AutoGen's runtime is turned off here as well as through the environment, because a team that was built
before the tracer was installed has already read the environment.

AutoGen makes no span for a model call. All classes of model clients, including those defined later, are watched for
calls that bypass the wire hook; a call that the hook saw gets no span here.
"""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, aclosing, nullcontext
from functools import partial, wraps
from typing import Any, cast

from autogen_agentchat.agents import BaseChatAgent
from autogen_agentchat.messages import HandoffMessage
from autogen_agentchat.teams import BaseGroupChat
from autogen_core import BaseAgent
from autogen_core._telemetry import TraceHelper
from autogen_core.models import ChatCompletionClient
from autogen_core.tools import BaseStreamTool, BaseTool
from opentelemetry import context, trace

from agl.tracing import (
    OpenSpan,
    Undo,
    around_async,
    current,
    current_span,
    open_span,
    patch,
    patch_subclasses,
    stepped,
    who,
)

_log = logging.getLogger(__name__)

_MANAGERS = ("SelectorGroupChatManager", "MagenticOneOrchestrator")
"""Managers of teams that call a model themselves, by class name because AutoGen does not export the classes."""

_AGENTCHAT = "autogen_agentchat."
_CORE = "autogen_core."


def install() -> list[Undo]:
    """Patch AutoGen; the returned functions, called from last to first, restore the originals."""
    return [
        patch(TraceHelper, "trace_block", _without_runtime_spans),
        patch(BaseGroupChat, "run_stream", _as_workflow),
        patch(BaseChatAgent, "run_stream", _apart),
        patch_subclasses(BaseChatAgent, {"on_messages": around_async(_turn), "on_messages_stream": _as_streamed_turn}),
        patch(BaseAgent, "on_message", around_async(_unspoken)),
        patch(BaseTool, "run_json", _with_values),
        patch(BaseStreamTool, "run_json_stream", _with_streamed_values),
        patch(BaseAgent, "publish_message", _with_handoff),
        patch_subclasses(ChatCompletionClient, {"create": around_async(_call), "create_stream": _watched_stream}),
    ]


def _without_runtime_spans(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def trace_block(self: Any, *args: Any, **options: Any) -> Any:
        if current() is None:
            return original(self, *args, **options)
        return nullcontext(trace.INVALID_SPAN)

    return trace_block


def _as_workflow(original: Callable[..., Any]) -> Callable[..., Any]:
    """Open a span around a team's run; this covers ``run`` too, which consumes ``run_stream``."""

    @wraps(original)
    def run_stream(self: Any, *args: Any, **options: Any) -> Any:
        return stepped(lambda: open_span(workflow=str(self.name), is_current=False), original(self, *args, **options))

    return run_stream


def _apart(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep an agent's span out of the context of its stream's reader, where AutoGen leaves it between messages."""

    @wraps(original)
    def run_stream(self: Any, *args: Any, **options: Any) -> Any:
        items = original(self, *args, **options)
        return items if current() is None else _kept_apart(items)

    return run_stream


async def _kept_apart(items: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Yield ``items``, each made in the OpenTelemetry context that the previous one left; the reader keeps its own."""
    inside: context.Context | None = None
    async with aclosing(items):
        while True:
            outside = context.get_current()
            if inside is not None:
                context.attach(inside)
            try:
                item = await anext(items)
            except StopAsyncIteration:
                return
            finally:
                inside = context.get_current()
                context.attach(outside)
            yield item


def _turn(agent: Any) -> AbstractContextManager[Any]:
    """Open a span around an agent's turn that is requested directly, because AutoGen makes none for it."""
    return nullcontext() if _is_within(agent) else open_span(agent=str(agent.name))


def _as_streamed_turn(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def on_messages_stream(self: Any, *args: Any, **options: Any) -> Any:
        items: AsyncIterator[Any] = original(self, *args, **options)
        if _is_within(self):
            return items
        return stepped(lambda: open_span(agent=str(self.name), is_current=False), items)

    return on_messages_stream


def _is_within(agent: Any) -> bool:
    """Return true if the agent's turn needs no span: outside of a rollout, or if the agent is the innermost already."""
    return current() is None or who().agent == str(agent.name)


def _unspoken(agent: Any) -> AbstractContextManager[Any]:
    """Open a span around the handling of a message by an agent for which AutoGen makes no span."""
    about = _unspoken_agent(agent)
    return open_span(**about) if about else nullcontext()


def _call(client: Any, *, is_current: bool = True) -> OpenSpan:
    return open_span(client=_client_name(client), unless_called=True, is_current=is_current)


def _watched_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def create_stream(self: Any, *args: Any, **options: Any) -> Any:
        return stepped(partial(_call, self, is_current=False), original(self, *args, **options))

    return create_stream


def _with_handoff(original: Callable[..., Any]) -> Callable[..., Any]:
    """Record an agent's hand-off when its message is published, while the agent's own span is current."""

    @wraps(original)
    async def publish_message(self: Any, message: Any, *args: Any, **options: Any) -> None:
        about = {} if current() is None else _handoff(message)
        if about and about["source"] == who().agent:
            current_span().set(**about)
        await original(self, message, *args, **options)

    return publish_message


def _with_values(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    async def run_json(self: Any, args: Mapping[str, Any], *more: Any, **options: Any) -> Any:
        tool = self if current() is None else _ObservedTool(self, args)
        return await original(tool, args, *more, **options)

    return run_json


def _with_streamed_values(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    async def run_json_stream(
        self: Any, args: Mapping[str, Any], *more: Any, **options: Any
    ) -> AsyncGenerator[Any, None]:
        tool = self if current() is None else _ObservedTool(self, args)
        async with aclosing(original(tool, args, *more, **options)) as items:
            async for item in items:
                yield item

    return run_json_stream


class _ObservedTool:
    """Replaces a tool inside AutoGen's ``run_json``, and writes arguments and result to the current span.

    All other attributes are the tool's. AutoGen's event log has these values too, but only after the span has ended.
    """

    def __init__(self, tool: Any, arguments: Mapping[str, Any]) -> None:
        self._agl_tool = tool
        self._agl_arguments = arguments

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agl_tool, name)

    async def run(self, *args: Any, **options: Any) -> Any:
        current_span().set(arguments=dict(self._agl_arguments))
        result = await self._agl_tool.run(*args, **options)
        self._agl_returned(result)
        return result

    async def run_stream(self, *args: Any, **options: Any) -> AsyncGenerator[Any, None]:
        result = None
        current_span().set(arguments=dict(self._agl_arguments))
        async with aclosing(self._agl_tool.run_stream(*args, **options)) as items:
            async for result in items:
                yield result
        self._agl_returned(result)

    def _agl_returned(self, result: Any) -> None:
        """Write the result to the span, as the text that the model reads."""
        try:
            text = str(self._agl_tool.return_value_as_string(result))
        except Exception:  # noqa: BLE001  # isolation point: runs inside the agent's own call
            _log.exception("The result of an AutoGen tool could not be recorded.")
        else:
            current_span().set(result=text)


def _unspoken_agent(agent: Any) -> dict[str, Any]:
    """Return the name and id of the agent that handles a message, if AutoGen makes no span for it; else empty."""
    kind = cast("type[Any]", type(agent))
    is_chat = kind.__module__.startswith(_AGENTCHAT)
    if kind.__module__.startswith(_CORE) or (is_chat and kind.__name__ not in _MANAGERS):
        return {}
    return {"agent": kind.__name__ if is_chat else str(agent.id.type), "agent_id": str(agent.id)}


def _client_name(client: Any) -> str:
    """Return the class name of a model client, with its module."""
    kind = cast("type[Any]", type(client))
    return f"{kind.__module__}.{kind.__qualname__}"


def _handoff(published: Any) -> dict[str, str]:
    """Return source and target if ``published`` is a hand-off message; else empty."""
    message = getattr(published, "message", None)
    return {"source": message.source, "target": message.target} if isinstance(message, HandoffMessage) else {}
