"""Makes ids: sortable by time for rollouts, random for spans and traces.

Ids of spans and traces come from a random generator of this module, seeded by the operating system and again after a
fork. They do not use ``os.urandom``, because it releases the interpreter's lock, and a busy process waits long to get
the lock back. The ids are unique but not secret, and ``random.seed`` does not affect them.
"""

import os
import random
import time

_random = random.Random(os.urandom(32))
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _random.seed(os.urandom(32)))


def new_rollout_id() -> str:
    """A new id that sorts by creation time: ``ro-`` and 24 hex digits, of which the first 12 are milliseconds."""
    # 48 random bits: within one millisecond a store would need 16 million rollouts before two are
    # likely to meet.
    return f"ro-{time.time_ns() // 1_000_000:012x}{os.urandom(6).hex()}"


def attempt_id_of(rollout_id: str, number: int) -> str:
    """The id of a rollout's attempt; ``number`` counts from 1."""
    return f"{rollout_id}.{number}"


def rollout_id_of(attempt_id: str) -> str:
    """The id of the rollout to which an attempt belongs."""
    # From the right: rollout ids are the caller's and may contain dots.
    return attempt_id.rpartition(".")[0]


def new_span_id() -> str:
    """A new id of a span: 16 random hex digits."""
    return f"{_random.getrandbits(64):016x}"


def new_trace_id() -> str:
    """A new id of a trace: 32 random hex digits."""
    return f"{_random.getrandbits(128):032x}"
