"""Registers the commands that run recorded rollouts again."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import CommandEntry


@hookimpl
def agl_commands() -> Iterable[CommandEntry]:
    """Register replays, forks, trials of versions, and rescoring."""
    yield CommandEntry(name="replay", factory="agl_replay.cli.replay:replay", summary="run a recorded rollout again")
    yield CommandEntry(
        name="fork", factory="agl_replay.cli.fork:fork", summary="run a recorded rollout anew from one call"
    )
    yield CommandEntry(
        name="reward", factory="agl_replay.cli.reward:reward", summary="score recorded rollouts again, running no agent"
    )
    yield CommandEntry(
        name="try", factory="agl_replay.cli.try_:try_", summary="compare versions or edits of a prompt on a few tasks"
    )
