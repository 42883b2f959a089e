"""Spans for models that bypass the wire hook and that CrewAI reports by no event.

CrewAI's own clients emit an event for each call; a program's subclass of ``BaseLLM`` need not. Every such class is
watched, including those defined later. A call that the wire hook saw, or that an event reports, gets no span here.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from crewai import BaseLLM
from crewai.events.event_bus import CrewAIEventsBus

from agl.tracing import OpenSpan, Undo, current, note_model_call, open_span, patch, patch_subclasses
from agl_crewai import _convert


def install() -> list[Undo]:
    """Watch the classes; the returned functions restore the originals."""
    watched = patch_subclasses(BaseLLM, {"call": _watched, "acall": _watched_async}, besides="crewai")
    return [watched, patch(CrewAIEventsBus, "emit", _noting_model_calls)]


def _open(model: BaseLLM) -> OpenSpan:
    client = _convert.class_name(model)
    return open_span(client=client, server=model.base_url, model=model.model, unless_called=True)


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(self: BaseLLM, *args: Any, **options: Any) -> Any:
        if current() is None:
            return original(self, *args, **options)
        with _open(self):
            return original(self, *args, **options)

    return call


def _watched_async(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    async def acall(self: BaseLLM, *args: Any, **options: Any) -> Any:
        if current() is None:
            return await original(self, *args, **options)
        with _open(self):
            return await original(self, *args, **options)

    return acall


def _noting_model_calls(original: Callable[..., Any]) -> Callable[..., Any]:
    """Note the calls that events report here, where they are emitted; their handlers run elsewhere, and later."""

    @wraps(original)
    def emit(self: CrewAIEventsBus, source: Any, event: Any, **options: Any) -> Any:
        if current() is not None and _convert.is_model_call(event):
            note_model_call()
        return original(self, source, event, **options)

    return emit
