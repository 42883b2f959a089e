"""Registers the commands that run recorded rollouts again."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import CommandEntry


@hookimpl
def agl_commands() -> Iterable[CommandEntry]:
    """Register ``agl replay``, which has modes for forks and scores, and ``agl resources try``."""
    yield CommandEntry(
        name="replay", factory="agl_replay.cli.replay:replay", summary="rerun, fork or rescore a recorded rollout"
    )
    yield CommandEntry(
        name="try",
        parent="resources",
        factory="agl_replay.cli.try_:try_",
        summary="compare versions or edits of a prompt on a few tasks",
    )
