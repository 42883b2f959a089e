"""The positions of a run's learning rates in their schedules, for VERL's training workers on Ray.

VERL counts its steps from 1 whenever it starts on other weights, and its schedules begin and end with that count. Here
they count the steps of the experiment, as in one process. VERL's configuration has no key for the start of a schedule,
so its workers read it from their environment (`loss_worker.ClusterWorker`).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agl_algo_verl.settings.settings import VerlSettings

SCHEDULE_ENV = "AGL_VERL_SCHEDULE"
"""The environment variable of VERL's workers that holds a `Schedule` as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The length of the schedules, and their positions when VERL starts.

    Attributes:
        steps: Number of steps of the whole run.
        policy: Completed steps of the policy's schedule; steps that train only a critic do not count.
        critic: Completed steps of the critic's schedule.
    """

    steps: int
    policy: int
    critic: int

    def variables(self) -> dict[str, str]:
        """Return the environment variable from which `found_schedule` reads this schedule."""
        return {SCHEDULE_ENV: json.dumps(asdict(self))}


def schedule_after(done: int, *, settings: VerlSettings, steps: int) -> Schedule:
    """Return the schedule of a run with `steps` steps, at the position after `done` steps."""
    alone = max(0, settings.trainer.critic_warmup - 1) if settings.has_critic else 0
    return Schedule(steps=steps, policy=max(0, done - alone), critic=done)


def found_schedule() -> Schedule | None:
    """Return the schedule from this process's environment; None outside a cluster, and with Megatron."""
    written = os.environ.get(SCHEDULE_ENV)
    return None if written is None else Schedule(**json.loads(written))
