"""Parts of runners that start programs, or that bring agents with them.

Processes that end with their descendants, bounded output; agents and tasks that belong to a runner.
"""

from agl_run.agents.agent import AgentSource, TaskSets
from agl_run.run.exec import exec_program
from agl_run.runners.bound_process import BoundProcess
from agl_run.runners.command import PrintedText
from agl_run.runners.result import describe_error
from agl_run.runners.setup import LastingRunner, LostError

__all__ = [
    "AgentSource",
    "BoundProcess",
    "LastingRunner",
    "LostError",
    "PrintedText",
    "TaskSets",
    "describe_error",
    "exec_program",
]
