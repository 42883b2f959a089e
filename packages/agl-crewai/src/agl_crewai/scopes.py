"""Leaves CrewAI's scopes with the exception that leaves a crew, a flow or an agent.

CrewAI does not end some of them after a failure, and none after a cancellation, and keeps them in the context of the
caller, whose next calls would count as the failed agent's.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from crewai import Agent, Crew, Flow

from agl.tracing import Undo, current, patch
from agl_crewai.listener import left_with_exception


def install() -> list[Undo]:
    """Watch the functions that run in their caller's context; the returned functions restore the originals."""
    return [
        patch(Crew, "kickoff", _left),
        patch(Crew, "akickoff", _left_async),
        patch(_defining(Flow, "kickoff_async"), "kickoff_async", _left_async),
        patch(Agent, "kickoff_async", _left_async),
    ]


def _defining(kind: type[Any], name: str) -> type[Any]:
    """The class that defines a method, which for flows is in a module that CrewAI does not export."""
    return next(each for each in kind.__mro__ if name in vars(each))


def _left(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def kickoff(self: Any, *args: Any, **options: Any) -> Any:
        if current() is None:
            return original(self, *args, **options)
        with left_with_exception():
            return original(self, *args, **options)

    return kickoff


def _left_async(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    async def kickoff(self: Any, *args: Any, **options: Any) -> Any:
        if current() is None:
            return await original(self, *args, **options)
        with left_with_exception():
            return await original(self, *args, **options)

    return kickoff
