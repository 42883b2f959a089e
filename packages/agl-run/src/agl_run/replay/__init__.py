"""Replays: recorded rollouts run again, with recorded answers or with the part of some agents replaced."""

from agl_run.replay.plan import REPLAY, CounterfactualCredit, ReplayFn, ReplayPlan, replay_of
from agl_run.replay.player import VERSION

__all__ = ["REPLAY", "VERSION", "CounterfactualCredit", "ReplayFn", "ReplayPlan", "replay_of"]
