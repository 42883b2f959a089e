"""Parts of runners that start programs, or that bring agents with them.

Processes that end with their descendants, bounded output; agents and tasks that belong to a runner.
"""

from agl_run.agents.task_sets import AgentSource, TaskSets
from agl_run.run.exec import exec_program
from agl_run.runners.kept import KeptProcess
from agl_run.runners.lasting import LastingRunner, LostError
from agl_run.runners.printed import PrintedText
from agl_run.runners.result import describe_error

__all__ = [
    "AgentSource",
    "KeptProcess",
    "LastingRunner",
    "LostError",
    "PrintedText",
    "TaskSets",
    "describe_error",
    "exec_program",
]
