"""Ids: sortable by time for rollouts, random for spans and traces."""

import os
import time


def new_rollout_id() -> str:
    """A new id that sorts by creation time: ``ro-`` and 24 hex digits, 48 bits of milliseconds first."""
    return f"ro-{time.time_ns() // 1_000_000:012x}{os.urandom(6).hex()}"


def attempt_id_of(rollout_id: str, number: int) -> str:
    """The id of a rollout's attempt; ``number`` counts from 1."""
    return f"{rollout_id}.{number}"


def rollout_id_of(attempt_id: str) -> str:
    """The rollout that an attempt belongs to."""
    return attempt_id.rpartition(".")[0]


def new_span_id() -> str:
    """16 random hex digits."""
    return os.urandom(8).hex()


def new_trace_id() -> str:
    """32 random hex digits."""
    return os.urandom(16).hex()
