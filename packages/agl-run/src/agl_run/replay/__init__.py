"""Players of replays and forks: they answer an attempt's model calls as a recorded rollout got them."""

from agl_run.replay.fork_player import ForkScript as ForkScript
from agl_run.replay.player import ReplayScript as ReplayScript
from agl_run.replay.script import Script as Script
from agl_run.replay.script import load_script as load_script
