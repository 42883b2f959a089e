"""Removal of old finished rollouts, and the turns that several processes take with it."""

from agl_inspect.retention.ownership import Ownership, is_owned
from agl_inspect.retention.removal import (
    FINISHED,
    RetentionLimits,
    compacted,
    delete_finished,
    needed_experiments,
    parse_duration,
    parse_size,
    removal_text,
    remove_old,
)
from agl_inspect.retention.turns import retaining, taking_turns

__all__ = [
    "FINISHED",
    "Ownership",
    "RetentionLimits",
    "compacted",
    "delete_finished",
    "is_owned",
    "needed_experiments",
    "parse_duration",
    "parse_size",
    "removal_text",
    "remove_old",
    "retaining",
    "taking_turns",
]
