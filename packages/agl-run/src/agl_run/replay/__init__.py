"""Replays: run recorded rollouts again, with recorded answers, with some agents replaced, or anew from one call on."""

from agl_run.replay.fork_player import ForkScript
from agl_run.replay.plan import (
    FORK,
    REPLAY,
    AnyPlan,
    CounterfactualCredit,
    DivergenceError,
    ForkPlan,
    ReplayFn,
    ReplayPlan,
    fork_of,
    is_diverged,
    replay_of,
    sampling_mode,
)
from agl_run.replay.player import VERSION, ReplayScript
from agl_run.replay.script import Script, load_script

__all__ = [
    "FORK",
    "REPLAY",
    "VERSION",
    "AnyPlan",
    "CounterfactualCredit",
    "DivergenceError",
    "ForkPlan",
    "ForkScript",
    "ReplayFn",
    "ReplayPlan",
    "ReplayScript",
    "Script",
    "fork_of",
    "is_diverged",
    "load_script",
    "replay_of",
    "sampling_mode",
]
