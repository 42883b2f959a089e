"""Replays: run recorded rollouts again, with recorded answers, with some agents replaced, or anew from one call on."""

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
)
from agl_run.replay.player import VERSION, ReplayScript
from agl_run.replay.script import load_script

__all__ = [
    "FORK",
    "REPLAY",
    "VERSION",
    "AnyPlan",
    "CounterfactualCredit",
    "DivergenceError",
    "ForkPlan",
    "ReplayFn",
    "ReplayPlan",
    "ReplayScript",
    "fork_of",
    "is_diverged",
    "load_script",
    "replay_of",
]
