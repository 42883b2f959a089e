"""Exports the parts that runners need to start programs or to bring their own agents.

These are processes that end with their descendants, bounded program output, and the contract of runners that have
agents and tasks of their own.
"""

from agl_run.agents.agent import AgentSource as AgentSource
from agl_run.agents.agent import TaskSets as TaskSets
from agl_run.cli.exec import exec_program as exec_program
from agl_run.runners.bound_process import BoundProcess as BoundProcess
from agl_run.runners.command import PrintedText as PrintedText
from agl_run.runners.result import describe_error as describe_error
from agl_run.runners.setup import LastingRunner as LastingRunner
from agl_run.runners.setup import LostError as LostError
