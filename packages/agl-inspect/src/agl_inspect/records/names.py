"""Makes and parses the names of experiments, trials, forks and rollouts, and describes why a rollout failed."""

import hashlib
import re
from typing import Any, cast

from agl.errors import ConfigError, RewardError
from agl.schemas import Attempt, Json, Rollout, to_json

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")

MAX_NAME = 80
"""Largest length of the names of experiments, algorithms and resources, which become parts of ids."""

TRIAL = "-dev"
"""Suffix of the experiment name under which ``agl dev`` records a dry run."""

PROMPT_TRIAL = "-try"
"""Suffix of the experiment name under which ``agl resources try`` records a trial."""

FORKS = "-fork"
"""Suffix of the experiment name under which ``agl replay --fork`` records forks."""

ROUND = "-learn-"
"""Text between the name and the number in the experiment name of a round of ``agl learn``."""

ORIGIN = "agl resources try"
"""Value of the metadata key ``origin`` in versions that ``agl resources try`` has published."""


MAX_ERROR = 500
"""The most characters of an error's first line that a message shows."""


def id_prefix(experiment: str, run: int, algorithm: str, mode: str, *, step: int | None = None) -> str:
    """Return the prefix of the ids of an algorithm's rollouts in one mode; with ``step``, only of that step."""
    prefix = f"{experiment}-{run}-{algorithm}-{mode}-"
    return prefix if step is None else f"{prefix}{step_name(step)}-"


def step_name(step: int) -> str:
    """Format a step's number as part of a rollout's id, so that ids sort by step."""
    return f"{step:05d}" if step < 100_000 else f"x{step:012d}"


def group_id_of(task: Json, key: str = "") -> str:
    """Return the group id of a task: the task's value under ``key`` if a key is given, else a digest of the task.

    Raises :class:`ConfigError` if the task lacks the key.
    """
    if key:
        value = cast("dict[str, Json]", task).get(key) if isinstance(task, dict) else None
        if value is None:
            raise ConfigError(
                f"[experiment] group_key is {key!r}, which this task lacks: {str(cast('Any', task))[:80]}"
            )
        return str(value)
    return f"task-{hashlib.blake2b(to_json(task), digest_size=8).hexdigest()}"


def run_of(rollout: Rollout) -> int | None:
    """Return the number of the run that made a rollout, parsed from the rollout's id; ``None`` without a run."""
    before, _, rest = rollout.rollout_id.partition(f"{rollout.experiment}-")
    number = rest.partition("-")[0]
    is_of_run = not before and number.isdecimal() and "algorithm" in rollout.metadata
    return int(number) if is_of_run else None


def broke_in_reward(attempt: Attempt | None) -> bool:
    """Return true if an attempt failed because a reward emitter raised an error, and not because its agent did."""
    error = attempt.error if attempt else None
    return error is not None and error.type == f"{RewardError.__module__}.{RewardError.__qualname__}"


def error_of(rollout: Rollout, attempt: Attempt | None) -> str:
    """Return the type of a failed rollout's error and the first line of the message, as one text."""
    error = attempt.error if attempt else None
    if error is None:
        return f"{rollout.status} without an error"
    says_all = error.type == "agl.errors.RunError" or broke_in_reward(attempt)
    kind = "" if says_all else f"{error.type}: "
    text = f"{kind}{error.message.strip()}".splitlines()[0]
    return text if len(text) <= MAX_ERROR else f"{text[:MAX_ERROR]}…"
