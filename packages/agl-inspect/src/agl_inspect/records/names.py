"""Makes and reads the names of experiments, trials, forks and rollouts, and describes why a rollout failed."""

import hashlib
import re
from typing import Any, cast

from agl.errors import ConfigError, RewardError
from agl.schemas import Attempt, Json, Rollout, to_json

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")

MAX_NAME = 80
"""Names of experiments, algorithms and resources, which are parts of ids."""

TRIAL = "-dev"
"""The end of the name of the experiment that a trial by ``agl dev`` is recorded as."""

PROMPT_TRIAL = "-try"
"""The end of the name of the experiment that a trial by ``agl resources try`` is recorded as."""

FORKS = "-fork"
"""The end of the name of the experiment that forks by ``agl replay --fork`` are recorded as."""

ORIGIN = "agl resources try"
"""The origin, in their metadata, of versions that ``agl resources try`` published."""


MAX_ERROR = 500
"""Characters of an error's first line that a message shows."""


def id_prefix(experiment: str, run: int, algorithm: str, mode: str, *, step: int | None = None) -> str:
    """Return how the ids begin of the rollouts that an algorithm asked for, in all steps or in one."""
    prefix = f"{experiment}-{run}-{algorithm}-{mode}-"
    return prefix if step is None else f"{prefix}{step_name(step)}-"


def step_name(step: int) -> str:
    """Format a step for a rollout's id, so that ids sort by step: five digits, or ``x`` and twelve."""
    return f"{step:05d}" if step < 100_000 else f"x{step:012d}"


def group_id_of(task: Json, key: str = "") -> str:
    """Return the task's identity: the value of its ``key`` if one is given, else a digest of its content."""
    if key:
        value = cast("dict[str, Json]", task).get(key) if isinstance(task, dict) else None
        if value is None:
            raise ConfigError(
                f"[experiment] group_key is {key!r}, which this task lacks: {str(cast('Any', task))[:80]}"
            )
        return str(value)
    return f"task-{hashlib.blake2b(to_json(task), digest_size=8).hexdigest()}"


def run_of(rollout: Rollout) -> int | None:
    """Return the run of its experiment that made a rollout, from its id; ``None`` if no run made it."""
    before, _, rest = rollout.rollout_id.partition(f"{rollout.experiment}-")
    number = rest.partition("-")[0]
    is_of_run = not before and number.isdecimal() and "algorithm" in rollout.metadata
    return int(number) if is_of_run else None


def broke_in_reward(attempt: Attempt | None) -> bool:
    """Return true for an attempt that failed because a reward emitter broke, and not its agent."""
    error = attempt.error if attempt else None
    return error is not None and error.type == f"{RewardError.__module__}.{RewardError.__qualname__}"


def error_of(rollout: Rollout, attempt: Attempt | None) -> str:
    """Return the type of a failed rollout's error and the first line of its message."""
    error = attempt.error if attempt else None
    if error is None:
        return f"{rollout.status} without an error"
    says_all = error.type == "agl.errors.RunError" or broke_in_reward(attempt)
    kind = "" if says_all else f"{error.type}: "
    text = f"{kind}{error.message.strip()}".splitlines()[0]
    return text if len(text) <= MAX_ERROR else f"{text[:MAX_ERROR]}…"
