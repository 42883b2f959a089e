"""Answers an attempt's model calls from a recorded rollout, for replays and forks."""

from agl_run.replay.fork_player import ForkScript as ForkScript
from agl_run.replay.player import ReplayScript as ReplayScript
from agl_run.replay.script import Script as Script
from agl_run.replay.script import load_script as load_script
