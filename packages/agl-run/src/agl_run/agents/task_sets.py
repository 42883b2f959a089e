"""Runners that bring agents with them: ``agent = "RUNNER:NAME"`` names one of theirs, and no module.

An environment of another library is such an agent: it has tasks, plays them, and rewards what it saw.
"""

from collections.abc import Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from agl.schemas import Json
from agl_run.agents.agent import AgentSpec

TaskSets: TypeAlias = tuple[Sequence[Json], Sequence[Json]]
"""Training tasks and validation tasks."""


@runtime_checkable
class AgentSource(Protocol):
    """The class of a runner that brings agents; both functions are static, and called before a runner is built."""

    @staticmethod
    def check(agent: AgentSpec) -> None:
        """Look for the agent called ``agent.name``.

        Raises:
            ConfigError: There is none, or it refuses ``agent.args``; says what to install or to write.
        """
        ...

    @staticmethod
    def tasks(agent: AgentSpec) -> TaskSets:
        """Return the tasks that belong to the agent; called where the experiment names none.

        Raises:
            ConfigError: They cannot be had.
        """
        ...
