"""Imported by VERL before it builds a model (`model.external_lib`): its training worker.

It is needed for a loss of agl-objectives, and for a step of several updates. VERL's worker of a cluster names the class
of the model that it trains in `actor_worker_cls`, and no setting reaches it. It becomes `LossWorker`, which reads the
loss from VERL's own configuration and the updates from the rows (`loss_worker.py`). A VERL that opens its
model otherwise is refused; a process without a training worker, such as a server's, stays as it is.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from agl_algo_verl.patched_lines import expect_line

OPENED = "self.actor = self.actor_worker_cls(config=actor_training_config)"
LOSS = "self.loss_fn = partial(ppo_loss, config=actor_config)"
"""With `OPENED`, the lines of VERL that open the model and give it its loss."""


def use_loss_worker() -> None:
    """Let VERL's worker in this process train with `LossWorker`; calling it again changes nothing."""
    module: Any = sys.modules.get("verl.workers.engine_workers")
    if module is None:
        return
    worker = module.ActorRolloutRefWorker
    for line in (OPENED, LOSS):
        expect_line(worker.init_model, line)
    worker.actor_worker_cls = importlib.import_module("agl_algo_verl.loss_worker").LossWorker


use_loss_worker()
