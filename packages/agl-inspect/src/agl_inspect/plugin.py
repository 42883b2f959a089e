"""Registers the commands that read recorded runs, and the command that lists plugins."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import CommandEntry

_COMMANDS = {
    "runs": "list, remove and tidy recorded rollouts",
    "show": "show one rollout as a tree",
    "why": "explain the outcome of every model call",
    "audit": "look for patterns by which rollouts won their reward",
    "metrics": "print, draw and judge the numbers that algorithms logged",
    "sql": "query everything that is recorded",
    "resources": "list, compare, try and promote resource versions",
    "data": "import, export, archive and copy runs",
    "plugins": "list, show and check plugins",
}


@hookimpl
def agl_commands() -> Iterable[CommandEntry]:
    """Register the commands that read a store, and the command that lists plugins."""
    for name, summary in _COMMANDS.items():
        module = "show" if name == "why" else name
        yield CommandEntry(name=name, factory=f"agl_inspect.cli.{module}:{name}", summary=summary)
