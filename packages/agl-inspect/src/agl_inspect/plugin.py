"""Registers the commands that look at what was recorded."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import CommandEntry


@hookimpl
def agl_commands() -> Iterable[CommandEntry]:
    """Register the commands that read a store, and the one that shows plugins."""
    yield CommandEntry(
        name="runs", factory="agl_inspect.cli.runs:runs", summary="list, remove and tidy recorded rollouts"
    )
    yield CommandEntry(name="show", factory="agl_inspect.cli.show:show", summary="show one rollout as a tree")
    yield CommandEntry(name="why", factory="agl_inspect.cli.why:why", summary="explain the outcome of every model call")
    yield CommandEntry(
        name="metrics", factory="agl_inspect.cli.metrics:metrics", summary="print the numbers that algorithms logged"
    )
    yield CommandEntry(name="plot", factory="agl_inspect.cli.metrics:plot", summary="draw metrics over the steps")
    yield CommandEntry(
        name="suggest", factory="agl_inspect.cli.suggest:suggest", summary="say what keeps an experiment from learning"
    )
    yield CommandEntry(name="sql", factory="agl_inspect.cli.sql:sql", summary="query everything that is recorded")
    yield CommandEntry(
        name="workers", factory="agl_inspect.cli.runs:workers", summary="list trainers and workers, and if they live"
    )
    yield CommandEntry(
        name="resources",
        factory="agl_inspect.cli.resources:resources",
        summary="list, compare and promote resource versions",
    )
    yield CommandEntry(
        name="plugins", factory="agl_inspect.cli.plugins:plugins", summary="list, show and check plugins"
    )
