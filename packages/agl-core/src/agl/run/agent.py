"""What an agent is: a function, a class with a ``rollout`` method, or a command line."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class AgentSpec:
    """An agent by import path, by object, or as a command; exactly one is set.

    Attributes:
        path: ``"module:attribute"``; importable in a child process.
        target: The object itself: a function, a ``LitAgent``, or a ``LitAgent`` class.
        command: Program and arguments; ``{task}`` in an argument is replaced by a file with the task's JSON.
    """

    path: str = ""
    target: Callable[..., Any] | None = None
    command: tuple[str, ...] = ()
