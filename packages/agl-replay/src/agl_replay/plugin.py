"""Registers the commands that run recorded rollouts again."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import CommandEntry


@hookimpl
def agl_commands() -> Iterable[CommandEntry]:
    """Register replays with their modes, and trials of versions."""
    yield CommandEntry(
        name="replay", factory="agl_replay.cli.replay:replay", summary="run, fork or score a recorded rollout again"
    )
    yield CommandEntry(
        name="try",
        parent="resources",
        factory="agl_replay.cli.try_:try_",
        summary="compare versions or edits of a prompt on a few tasks",
    )
