"""Patches CrewAI while a tracer is installed; outside a rollout every patch is inert.

CrewAI's own clients emit an event for each call; a program's subclass of ``BaseLLM`` need not. Every such class is
watched, including those defined later: a call that the wire hook saw, or that an event reports, gets no span here.

CrewAI does not end some of its scopes after a failure, and none after a cancellation, and keeps them in the context of
the caller, whose next calls would count as the failed agent's. So they are left with the exception that leaves a crew,
a flow or an agent.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from crewai import Agent, BaseLLM, Crew, Flow
from crewai.events.event_bus import CrewAIEventsBus

from agl.tracing import (
    OpenSpan,
    Undo,
    around,
    around_async,
    current,
    note_model_call,
    open_span,
    patch,
    patch_subclasses,
)
from agl_crewai import _convert
from agl_crewai.listener import left_with_exception


def install() -> Iterator[Undo]:
    """Change CrewAI; yields the functions that restore the originals."""
    # Subclasses of the program's own only: CrewAI's clients report by events.
    yield patch_subclasses(BaseLLM, {"call": around(_open), "acall": around_async(_open)}, besides="crewai")
    yield patch(CrewAIEventsBus, "emit", _noting_model_calls)
    # The functions that run in their caller's context, where a scope that stays open does harm.
    yield patch(Crew, "kickoff", around(_left))
    yield patch(Crew, "akickoff", around_async(_left))
    yield patch(_defining(Flow, "kickoff_async"), "kickoff_async", around_async(_left))
    yield patch(Agent, "kickoff_async", around_async(_left))


def _open(model: BaseLLM) -> OpenSpan:
    client = _convert.class_name(model)
    return open_span(client=client, server=model.base_url, model=model.model, unless_called=True)


def _left(_: Any) -> Any:
    return left_with_exception()


def _defining(kind: type[Any], name: str) -> type[Any]:
    """The class that defines a method, which for flows is in a module that CrewAI does not export."""
    return next(each for each in kind.__mro__ if name in vars(each))


def _noting_model_calls(original: Callable[..., Any]) -> Callable[..., Any]:
    """Note the calls that events report here, where they are emitted; their handlers run elsewhere, and later."""

    @wraps(original)
    def emit(self: CrewAIEventsBus, source: Any, event: Any, **options: Any) -> Any:
        if current() is not None and _convert.is_model_call(event):
            note_model_call()
        return original(self, source, event, **options)

    return emit
