"""Parts of runners that start programs: processes that end with their descendants, bounded output, attempt tokens."""

from agl_run.runners.kept import KeptProcess
from agl_run.runners.lasting import LastingRunner, LostError
from agl_run.runners.printed import PrintedText
from agl_run.runners.result import describe_error
from agl_run.runners.tokens import issue_token

__all__ = ["KeptProcess", "LastingRunner", "LostError", "PrintedText", "describe_error", "issue_token"]
