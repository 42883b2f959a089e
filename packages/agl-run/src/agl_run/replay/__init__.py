"""Replays: run recorded rollouts again, with recorded answers or with some agents replaced."""

from agl_run.replay.plan import REPLAY, CounterfactualCredit, ReplayFn, ReplayPlan, replay_of
from agl_run.replay.player import VERSION, ReplayScript
from agl_run.replay.script import load_script

__all__ = [
    "REPLAY",
    "VERSION",
    "CounterfactualCredit",
    "ReplayFn",
    "ReplayPlan",
    "ReplayScript",
    "load_script",
    "replay_of",
]
