"""Chooses between rows that are packed one after the other in a pass, and rows that are padded to the longest.

VERL cuts dynamic micro-batches by the tokens of their rows. With packing, a pass computes just these tokens. With
padding, every row costs as many tokens as the longest, so that a pass may compute many times
`ppo_max_token_len_per_gpu`.
Packed rows need flash-attn, which needs a GPU and half precision. VERL packs by default and fails without flash-attn;
here rows are packed if possible.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from agl_algo_verl.settings.settings import VerlSettings


def with_packing(
    settings: VerlSettings, *, has_gpu: bool, has_kernels: bool | None = None
) -> tuple[VerlSettings, list[str]]:
    """Return the settings with `use_remove_padding` decided if it was left open, and notes on the decision.

    Args:
        settings: VERL's configuration.
        has_gpu: True if the machine that trains has a GPU.
        has_kernels: True if flash-attn is installed there; None to check this machine.
    """
    model = settings.actor_rollout_ref.model
    if model.use_remove_padding is not None or not settings.is_dynamic:
        return settings, []
    kernels = find_spec("flash_attn") is not None if has_kernels is None else has_kernels
    why = _obstacle(settings, has_gpu=has_gpu, has_kernels=kernels)
    policy = replace(settings.actor_rollout_ref, model=replace(model, use_remove_padding=not why))
    note = (
        "rows are padded, so that a pass may compute more tokens than "
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu, because {why}"
    )
    return replace(settings, actor_rollout_ref=policy), [note] if why else []


def _obstacle(settings: VerlSettings, *, has_gpu: bool, has_kernels: bool) -> str:
    """Return the reason why rows cannot be packed; `""` if they can."""
    if not has_gpu:
        return "there is no GPU"
    if not has_kernels:
        return "flash-attn is not installed (pip install flash-attn --no-build-isolation)"
    parts = {"actor_rollout_ref.actor.fsdp_config": settings.actor.fsdp_config}
    if settings.has_critic:
        parts["critic.fsdp"] = settings.critic.fsdp
    whole = [name for name, fsdp in parts.items() if fsdp.mixed_precision.param_dtype == "fp32"]
    return f"flash-attn computes in half precision, and {whole[0]}.mixed_precision.param_dtype is fp32" if whole else ""
