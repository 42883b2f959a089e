"""Imported by every process of VERL's cluster that trains on the CPU (VERL_USE_EXTERNAL_MODULES).

It registers the platform, and repairs two of three lines of VERL 0.9 that no setting reaches (the third is in
`ray_model`). A repair is refused where its line is not found, so that no other version of VERL is changed blindly.

- `verl.utils.distributed` asks torch for the process group "cpu:gloo,<device>:<backend>". On the CPU both halves name
  one device, which torch refuses. Here the second is called `cuda`, and nothing uses it.
- `verl.utils.model` opens a critic with flash-attention and nothing else, which needs a GPU. Here the critic gets the
  attention that its configuration names.
"""

from __future__ import annotations

import importlib
from typing import Any

from agl_algo_verl import cpu
from agl_algo_verl.patched_lines import expect_line

ATTENTION = 'attn_implementation="flash_attention_2"'
GROUP = 'f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"'
"""With `ATTENTION`, the lines of VERL that are repaired."""


def patch_process_group() -> None:
    """Give the second half of the process group another name."""
    module: Any = importlib.import_module("verl.utils.distributed")
    expect_line(module.initialize_global_process_group_ray, GROUP)
    module.get_device_name = lambda: "cuda"


def patch_critic() -> None:
    """Open critics without flash-attention."""
    module: Any = importlib.import_module("verl.utils.model")
    expect_line(module.load_valuehead_model, ATTENTION)
    module.load_valuehead_model = load_critic


def load_critic(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
    """Return the network of a critic; its value head always starts from the same numbers."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    return transformers.AutoModelForTokenClassification.from_pretrained(
        local_path, torch_dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
    )


cpu.register()
patch_process_group()
patch_critic()
