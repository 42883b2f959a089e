"""The model in a checkpoint of VERL on Ray, made into one that loads as what was trained.

VERL writes into `config.json` that the weights are in bfloat16, whatever they are, so loading would round them. With
LoRA it saves base and adapters apart, under names of peft that nothing loads; here they are added up:

    W = W_0 + (alpha / r) * B @ A        (LoRA, Hu et al. 2021, arXiv 2106.09685, section 4.1)

Both repairs are made in place before the weights are published, and may be repeated where one was interrupted. Training
continues from VERL's own shards beside them, which stay as they are.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

from safetensors import safe_open
from safetensors import torch as safetensors

from agl.errors import AglError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

PREFIX, BASE = "base_model.model.", ".base_layer"
"""Parts of names that peft puts around those of the model."""

WHOLE = "model.safetensors"
"""File of the merged weights."""

MERGED = {"format": "pt", "merged": "lora"}
"""Metadata of that file, by which it is known as merged; transformers reads `format`."""


def say_precision(folder: Path) -> None:
    """Write into the configuration in `folder` the precision that its weights have."""
    # All tensors of a checkpoint have one precision, so the first of the first file tells it.
    with cast("Any", safe_open)(min(folder.glob("*.safetensors")), framework="pt") as file:
        precision = str(file.get_tensor(min(file.keys())).dtype).removeprefix("torch.")
    path, fresh = folder / "config.json", folder / "config.json.new"
    config = json.loads(path.read_text(encoding="utf-8"))
    fresh.write_text(json.dumps(config | {"dtype": precision}, indent=2), encoding="utf-8")
    fresh.rename(path)


def merge_saved(folder: Path, *, scaling: float) -> None:
    """Add the adapters that VERL saved in `folder` to its weights; `scaling` is alpha / r.

    All weights are read into memory, and one file is written. Raises AglError where there are no adapters.
    """
    whole, files = folder / WHOLE, sorted(folder.glob("*.safetensors"))
    if not _is_merged(whole):
        state = {name: tensor for file in files for name, tensor in cast("Any", safetensors).load_file(file).items()}
        sums = merged(state, scaling=scaling)
        if len(sums) == len(state):
            raise AglError(f"VERL saved no adapters in {folder}, although lora_rank is set; is verl 0.9.1 installed?")
        fresh = folder / "merged.new"  # written whole before anything is removed; its name is no *.safetensors
        cast("Any", safetensors).save_file(sums, fresh, metadata=MERGED)
        fresh.rename(whole)
    for path in (*files, folder / "model.safetensors.index.json"):
        if path != whole:
            path.unlink(missing_ok=True)


def _is_merged(file: Path) -> bool:
    """Return whether a file is there and has weights with their adapters added."""
    if not file.is_file():
        return False
    with cast("Any", safe_open)(file, framework="pt") as opened:
        return opened.metadata() == MERGED


def merged(state: dict[str, Tensor], *, scaling: float) -> dict[str, Tensor]:
    """Return the weights with their adapters added, from peft's names to those of the model without adapters."""
    whole: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".lora_A." in name or ".lora_B." in name:
            continue
        layer = name.removesuffix(f"{BASE}.weight")
        plain = name.removeprefix(PREFIX).replace(f"{BASE}.", ".")
        whole[plain] = tensor
        if f"{layer}.lora_A.default.weight" in state:
            # [out, in] = [out, r] @ [r, in]; adapters may be in float32 over a base in bfloat16
            change = state[f"{layer}.lora_B.default.weight"] @ state[f"{layer}.lora_A.default.weight"]
            whole[plain] = tensor + (scaling * change).to(tensor.dtype)
    return whole
