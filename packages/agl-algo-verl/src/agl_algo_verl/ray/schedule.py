"""Where the learning rates of a run on Ray are in their schedules, for VERL's training workers.

VERL counts its steps from 1 whenever it starts on other weights, and its schedules begin and end with that count. Here
they count the steps of the experiment, as in one process. No key of VERL's configuration says where a schedule begins,
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
"""Environment variable of VERL's workers, with a `Schedule` in JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The length of the schedules, and the steps of them that are done when VERL starts.

    Attributes:
        steps: Steps of the whole run.
        policy: Steps of the policy's schedule that are done; a critic that learns alone does not move it.
        critic: Those of the critic's.
    """

    steps: int
    policy: int
    critic: int

    def variables(self) -> dict[str, str]:
        """Return the environment variable that `found_schedule` reads."""
        return {SCHEDULE_ENV: json.dumps(asdict(self))}


def schedule_after(done: int, *, settings: VerlSettings, steps: int) -> Schedule:
    """Return the schedule of a run of `steps` steps of which `done` are done."""
    alone = max(0, settings.trainer.critic_warmup - 1) if settings.has_critic else 0
    return Schedule(steps=steps, policy=max(0, done - alone), critic=done)


def found_schedule() -> Schedule | None:
    """Return the schedule that this process was started with; None outside of a cluster, and with Megatron."""
    written = os.environ.get(SCHEDULE_ENV)
    return None if written is None else Schedule(**json.loads(written))
