"""What every process of VERL's cluster imports when it trains on the CPU (VERL_USE_EXTERNAL_MODULES).

It registers the platform, and repairs the first of two lines of VERL 0.9 that no setting reaches (the second is in
`ray_model`): `verl.utils.distributed` asks torch for the process group "cpu:gloo,<device>:<backend>". On the CPU
both halves name one device, which torch refuses. Here the second is called `cuda`, and nothing uses it.
The repair is refused where that line is not found, so that another VERL is not changed unseen.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from agl_algo_verl import cpu
from agl_algo_verl.runtime import INSTALL, check_version

GROUP = 'f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"'


def expect(place: Any, line: str) -> None:
    """Raise RuntimeError unless the source of `place` has `line`."""
    check_version()
    if line not in inspect.getsource(place):
        raise RuntimeError(
            f"On the CPU agl-algo-verl replaces {line} in {place.__module__}, and this VERL has no such line. "
            f"Run: {INSTALL}"
        )


def patch_process_group() -> None:
    """Give the second half of the process group another name."""
    module: Any = importlib.import_module("verl.utils.distributed")
    expect(module.initialize_global_process_group_ray, GROUP)
    module.get_device_name = lambda: "cuda"


cpu.register()
patch_process_group()
