"""Parts of runners that start programs, or that bring agents with them.

Processes that end with their descendants, bounded output; agents and tasks that belong to a runner.
"""

from agl_run.runners.kept import KeptProcess
from agl_run.runners.lasting import LastingRunner, LostError
from agl_run.runners.printed import PrintedText
from agl_run.runners.result import describe_error
from agl_run.runners.sources import AgentSource, TaskSets

__all__ = [
    "AgentSource",
    "KeptProcess",
    "LastingRunner",
    "LostError",
    "PrintedText",
    "TaskSets",
    "describe_error",
]
