"""Prepares a process of VERL's cluster; VERL imports it before it builds a model (`model.external_lib`).

No setting of VERL selects the class of the model that a worker trains, so `privates.use_loss_worker` replaces it by
`ClusterWorker`, which reads the loss from VERL's own configuration and the updates from the rows (`loss_worker.py`). In
the process of VERL's trainer it replaces the critic's class by `ClusterCritic`. A process with neither class, such as a
server's, is not changed.

On the CPU it also registers the replica `agl_hf`, lets a frozen reference keep its weights in ordinary memory, and
seeds torch so that adapters always start from the same numbers.
"""

from __future__ import annotations

import os
from typing import Any, cast

import torch

from agl_algo_verl.privates import register_replica, repair_pinned_memory, use_loss_worker

if os.environ.get("VERL_PLATFORM") == "cpu":
    register_replica()
    repair_pinned_memory()
    cast("Any", torch).manual_seed(0)
use_loss_worker()
