"""Finds the cheapest change of settings with which training and serving fit on a device.

Every combination of changes is tried, and of those that fit the one with the smallest sum of costs is returned. The
costs are no measurements. They order the changes by the time that they take and by how far they move the result.
The last resort is VERL: its trainer and its server take turns on a card, and it spreads weights over several cards.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from agl_inspect.forecast.costs import Memory, Training

FULL = 0.9
"""The largest share of a device's memory to plan with; the rest is for what is not counted."""

_RANK = 32
_CARDS = (1, 2, 4, 8, 16, 32, 64)
_PER_NODE = 8
_BUDGET = 4096
_HALVINGS = 4

Change = tuple[int, str, dict[str, Any]]
"""A cost, the line of the experiment file, and the changed settings."""

_UNCHANGED: Change = (0, "", {})


VERL = 'use = "verl"'

SETTABLE = (
    "compute.dtype",
    "optim.moments",
    "compute.gradient_checkpointing",
    "lora.rank",
    "lora.is_quantized",
    "compute.token_budget",
)
"""The parameters that a proposal may set, in an algorithm that has them."""


def cheapest_change(
    training: Training, *, longest: int, limit: float, memory: Callable[[Training], Memory], settable: Collection[str]
) -> list[str]:
    """Return the parameters to set so that training and serving fit on a device; empty if no number of cards helps.

    Args:
        training: The settings as they are.
        longest: Number of tokens of the longest row, which no pass can cut.
        limit: Size of the device's memory in bytes.
        memory: Returns the memory with other settings.
        settable: The names in ``SETTABLE`` that the algorithm has as parameters, and ``VERL`` if VERL can replace it.
    """
    changes_of = _changes(training, memory(training).longest, longest)
    possible = [[each for each in one if each[1].partition(" ")[0] in ("", *settable)] for one in changes_of]
    found = sorted(product(*possible), key=lambda each: sum(cost for cost, _, _ in each))
    for changes in found:
        changed = training
        for _, _, settings in changes:
            changed = replace(changed, **settings)
        needed = memory(changed)
        if needed.training + needed.serving <= FULL * limit:
            return [line for _, line, _ in changes if line]
    if VERL not in settable:
        return []
    budget = max(longest, _BUDGET)
    spread = replace(training, gradient_checkpointing=True, token_budget=budget, is_sharded=True)
    return _verl(memory(spread), FULL * limit, lora_rank=training.lora_rank, budget=budget)


def _changes(training: Training, tokens: int, longest: int) -> list[Sequence[Change]]:
    """Return the alternatives for each setting, the present one first."""
    budgets = [tokens >> number for number in range(1, _HALVINGS + 1) if tokens >> number >= longest]
    float32: Change = (1, 'compute.dtype = "bfloat16"', {"dtype": "bfloat16"})
    eight: Change = (2, 'optim.moments = "8bit"', {"moments": "8bit"})
    again: Change = (3, "compute.gradient_checkpointing = true", {"gradient_checkpointing": True})
    quantized: Change = (5, "lora.is_quantized = true", {"is_quantized": True})
    adapters: Change = (8, f"lora.rank = {_RANK}", {"lora_rank": _RANK, "has_reference": False})
    return [
        [_UNCHANGED, *(n for n in [float32] if training.dtype == "float32")],
        [_UNCHANGED, *(n for n in [eight] if training.moments == "float32")],
        [_UNCHANGED, *(n for n in [again] if training.gradient_checkpointing is not True)],
        [_UNCHANGED, *(n for n in [quantized] if training.lora_rank and not training.is_quantized)],
        [_UNCHANGED, *(n for n in [adapters] if not training.lora_rank)],
        [_UNCHANGED]
        + [(cost, f"compute.token_budget = {b}", {"token_budget": b}) for cost, b in enumerate(budgets, start=2)],
    ]


def _verl(memory: Memory, room: float, *, lora_rank: int, budget: int) -> list[str]:
    """Return the parameters of VERL for the smallest number of cards that is enough."""
    states = memory.training - memory.activations
    # Each side leaves the cards to the other one: what it held there is in the machines' memory meanwhile.
    enough = [n for n in _CARDS if max(states / n + memory.activations, memory.serving / n) <= room]
    if not enough:
        return []
    actor, model = "actor_rollout_ref.actor", "actor_rollout_ref.model"
    return [
        VERL,
        'engine = "ray"',
        f"trainer.nnodes = {-(-enough[0] // _PER_NODE)}",
        f"trainer.n_gpus_per_node = {min(enough[0], _PER_NODE)}",
        f"{actor}.fsdp_config.param_offload = true",
        f"{actor}.fsdp_config.optimizer_offload = true",
        f"{actor}.ppo_max_token_len_per_gpu = {budget}",
        f"{model}.enable_gradient_checkpointing = true",
        *([f"{model}.lora_rank = {lora_rank}"] if lora_rank else []),
    ]
