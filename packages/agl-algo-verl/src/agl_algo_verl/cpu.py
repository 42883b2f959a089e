"""A CPU platform for VERL, which has none itself; VERL loads this module as one of its `verl.plugins`.

The module does nothing unless VERL_PLATFORM is `cpu`, so that an installation with GPUs is not affected. Functions
about memory and streams return the values of a device without own memory.
"""

# ruff: noqa: D102 - VERL's PlatformBase describes the methods

from __future__ import annotations

import os
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import torch
from verl.plugin.platform import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

if TYPE_CHECKING:
    from collections.abc import Generator

NAME = "cpu"


class _Device(ModuleType):
    """Device functions of the CPU, under the names that VERL expects, like those of `torch.cuda`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def memory_allocated(self, *_: Any) -> int:
        return 0

    max_memory_allocated = max_memory_reserved = memory_reserved = memory_allocated

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return 0, 0

    def empty_cache(self) -> None:
        return

    def manual_seed(self, seed: int) -> None:
        cast("Any", torch).manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def get_device_name(self, *_: Any) -> str:
        return NAME


class CpuPlatform(PlatformBase):
    """Describes the CPU to VERL: the gloo backend, one device, no memory management."""

    _device = _Device("agl_algo_verl.cpu.device")

    @property
    def device_name(self) -> str:
        return NAME

    @property
    def vendor_name(self) -> str:
        return NAME

    @property
    def device_module(self) -> ModuleType:
        return self._device

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return cast("int", torch.device(NAME))  # VERL hands it to `.to()` and `device_id=` only

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        del device_index

    def synchronize(self, device_index: int | None = None) -> None:
        del device_index

    def manual_seed(self, seed: int) -> None:
        self._device.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        del settings

    def empty_cache(self) -> None:
        return

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        del device_index
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Generator[None]:  # pyright: ignore[reportIncompatibleMethodOverride]  # VERL annotates what it yields
        del msg
        yield

    def profiler_start(self) -> None:
        return

    def profiler_stop(self) -> None:
        return

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


def register() -> None:
    """Register the platform with VERL; idempotent."""
    PlatformRegistry.register(platform=NAME)(CpuPlatform)


if os.environ.get("VERL_PLATFORM", "").strip().lower() == NAME:
    register()
