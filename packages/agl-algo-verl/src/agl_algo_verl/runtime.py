"""Return advice on settings that work but for which there is a better choice."""

from __future__ import annotations

import importlib
import os
import warnings
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

from agl.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from agl_algo_verl.settings.settings import VerlSettings

OLDEST, BELOW = (0, 9, 1), (0, 10)
"""The oldest supported version of VERL, and the first version that is no longer supported."""

INSTALL = 'pip install "verl>=0.9.1,<0.10"'


def check_version() -> None:
    """Raise ConfigError unless a supported version of VERL is installed; imports nothing."""
    try:
        found = version("verl")
    except PackageNotFoundError as error:
        raise ConfigError(f"The algorithm 'verl' needs VERL, which is not installed. Run: {INSTALL}") from error
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if not OLDEST <= numbers < BELOW:
        raise ConfigError(
            f"VERL {found} is installed, and agl-algo-verl works with verl>=0.9.1,<0.10: VERL moves its classes "
            f"between versions. Run: {INSTALL}"
        )


def attention(*, use_remove_padding: bool) -> str:
    """Return transformers' name for the attention: flash-attn, VERL's default, for packed rows; else `sdpa`."""
    return "flash_attention_2" if use_remove_padding else "sdpa"


def check_attention(settings: VerlSettings) -> None:
    """Raise ConfigError if the model needs flash-attn and it is not installed; imports nothing."""
    if settings.is_packed and find_spec("flash_attn") is None:
        raise ConfigError(
            "actor_rollout_ref.model.use_remove_padding = true needs flash-attn, which is not installed. "
            "Run: pip install flash-attn --no-build-isolation, or set it to false."
        )


def own_device() -> torch.device:
    """Return the device on which VERL trains in this process: the first GPU that torch can use, else the CPU."""
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def prepare() -> torch.device:
    """Prepare the environment so that VERL can be imported; returns the device on which it trains. Idempotent.

    Raises ConfigError for a wrong version, for a process in a larger process group, and if VERL was already imported
    with another platform.
    """
    check_version()
    device = own_device()
    if device.type == "cpu":
        os.environ.setdefault("VERL_PLATFORM", "cpu")
        os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")  # the FSDP engine is registered under that name only
    os.environ.setdefault("VERL_LOGGING_LEVEL", "WARNING")  # else four lines per checkpoint
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ.setdefault(name, value)
    # VERL's worker reads a master's address; a group of one never connects to it.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    _join(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # VERL warns of every engine that is not installed, and of its own imports
        importlib.import_module("verl.workers.engine")
        importlib.import_module("verl.workers.engine_workers")
    _check_platform(device)
    return device


def _join(device: torch.device) -> None:
    from torch import distributed

    if not distributed.is_initialized():
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        store = cast("Any", distributed).HashStore()
        cast("Any", distributed).init_process_group(backend, store=store, rank=0, world_size=1)
    if distributed.get_world_size() != 1:
        raise ConfigError(
            f"This process is one of {distributed.get_world_size()} in a torch process group, and the engine "
            "'inproc' trains in one process. Start `agl run` without torchrun."
        )


def _check_platform(device: torch.device) -> None:
    from verl.utils.device import get_device_name

    if get_device_name() != device.type:
        raise ConfigError(
            f"VERL was imported for {get_device_name()!r} before agl could ask for {device.type!r}, and cannot change. "
            f"Set VERL_PLATFORM={'cpu' if device.type == 'cpu' else 'nvidia'} before the program starts."
        )
