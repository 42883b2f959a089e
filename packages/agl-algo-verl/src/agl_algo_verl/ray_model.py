"""Imported by VERL before it builds a model on the CPU (`model.external_lib`): a replica, a seed and a repair.

It registers the replica `agl_hf`, seeds torch so that adapters always start from the same numbers, and repairs the
third of three lines of VERL 0.9 that no setting reaches (the others are in `ray_process`): the engine of a frozen
reference keeps its weights in pinned memory, which needs a GPU.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, cast

import torch

from agl_algo_verl.patched_lines import expect_line

ROLLOUTS: dict[tuple[str, str], str] = {("agl_hf", "async"): "agl_algo_verl.replica.HFRollout"}
"""The training worker's end of a replica; VERL has a public registry only for the trainer's end."""

PINNED = "CPUOffloadPolicy(pin_memory=True)"
"""The line of VERL that asks for pinned memory."""


def _replica() -> type:
    from agl_algo_verl.replica import HFReplica

    return HFReplica


def register_replica() -> None:
    """Make `rollout.name = "agl_hf"` known to VERL."""
    importlib.import_module("verl.workers.rollout.replica").RolloutReplicaRegistry.register("agl_hf", _replica)
    importlib.import_module("verl.workers.rollout.base")._ROLLOUT_REGISTRY.update(ROLLOUTS)


def patch_pinned_memory() -> None:
    """Let VERL's engine offload weights to ordinary memory."""
    module: Any = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    if not isinstance(module.CPUOffloadPolicy, partial):
        expect_line(module.FSDPEngine, PINNED)
        module.CPUOffloadPolicy = partial(_unpinned, module.CPUOffloadPolicy)


def _unpinned(policy: Any, *, pin_memory: bool = False) -> Any:
    del pin_memory
    return policy(pin_memory=False)


register_replica()
patch_pinned_memory()
cast("Any", torch).manual_seed(0)
