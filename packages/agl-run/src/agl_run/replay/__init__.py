"""Players of replays and forks: they answer an attempt's model calls as a recorded rollout got them."""

from agl_run.replay.fork_player import ForkScript
from agl_run.replay.player import ReplayScript
from agl_run.replay.script import Script, load_script

__all__ = ["ForkScript", "ReplayScript", "Script", "load_script"]
