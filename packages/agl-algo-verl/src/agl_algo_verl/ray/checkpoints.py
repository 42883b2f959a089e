"""The checkpoints that VERL on Ray leaves in an algorithm's directory: which are complete, and which are kept.

Every start of VERL's trainer on other weights has a separate directory, `verl-000007` after step 7, because VERL then
counts its steps from 1 again; in it VERL writes `global_step_N`. A checkpoint counts once its `steps.json` names the
steps of the algorithm that continue from it: the step that trained it, and later steps that trained nothing. A
checkpoint of VERL that no step counts is removed when the run continues.

VERL always writes into `config.json` that the weights are in bfloat16, so loading would round others. With LoRA it
saves base and adapters separately, under names of peft that nothing loads; here they are merged:

    W = W_0 + (alpha / r) * B @ A        (LoRA, Hu et al. 2021, arXiv 2106.09685, section 4.1)

Both repairs are made in place before the weights are published, and may be repeated after an interruption. Training
continues from VERL's own shards in the same checkpoint, which are not changed.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import safe_open
from safetensors import torch as safetensors

from agl.errors import AglError
from agl_algo_verl.ray.configuration import CHECKPOINTS, WEIGHTS
from agl_algo_verl.weights.probe import probe_files

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from agl.schemas import Weights
    from agl_algo_verl.settings.ray import RaySettings


STARTS = "verl-{:06d}"
"""Name of the directory for one start of VERL's trainer, formatted with the number of steps completed before."""

STEPS = "steps.json"

ORIGIN = "origin.json"
"""The file in a checkpoint that names the weights on which VERL was started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsaved:
    """A checkpoint that VERL writes, or has written, but that agl has not completed.

    Attributes:
        folder: The directory of the checkpoint.
        is_written: True if VERL has written it at the end of its step.
        seconds: The time that VERL took to write it.
    """

    folder: Path
    is_written: bool
    seconds: float


def weights_in(folder: Path, read: RaySettings) -> Path:
    """Return the directory in a checkpoint that holds the weights in Hugging Face's format."""
    return folder / WEIGHTS[read.strategy]


def complete(weights: Weights, folder: Path, *, read: RaySettings, probes: bool) -> None:
    """Repair VERL's weight files so that they load as trained, and add a probe; may be repeated after a failure.

    Raises AglError if VERL wrote no weights.
    """
    place = weights_in(folder, read)
    if not any(place.glob("*.safetensors")):
        raise AglError(
            f"VERL saved no weights in {place}. On several machines this directory must be one that all of "
            "them see: set `workdir` to a shared one."
        )
    if read.settings.is_lora:
        model = read.settings.actor_rollout_ref.model
        merge_saved(place, scaling=model.lora_alpha / model.lora_rank)
    say_precision(place)
    if probes:
        probe_files(weights)


def count(folder: Path, *, step: int, origin: str) -> None:
    """Record in a checkpoint that the algorithm's `step` continues from it, and that training began on `origin`."""
    known = steps_of(folder)
    for name, content in ((ORIGIN, {"uri": origin}), (STEPS, [*known, *([] if step in known else [step])])):
        fresh = folder / f"{name}.new"
        fresh.write_text(json.dumps(content), encoding="utf-8")
        fresh.rename(folder / name)


def steps_of(folder: Path) -> list[int]:
    """Return the steps of the algorithm that continue from a checkpoint; empty if no step does."""
    file = folder / STEPS
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []


def origins(workdir: Path) -> list[str]:
    """Return, for every checkpoint from which a step continues, the weights on which VERL was started."""
    counted = [path for path in workdir.glob(f"verl-*/{CHECKPOINTS.format('*')}") if steps_of(path)]
    return [json.loads((path / ORIGIN).read_text(encoding="utf-8"))["uri"] for path in counted]


def number(folder: Path) -> int:
    """Return the VERL step number after which a checkpoint was saved."""
    return int(folder.name.rpartition("_")[2])


def forget_after(folder: Path, *, step: int) -> None:
    """Remove the checkpoints of VERL's steps after `step`: agl never counted those steps as done, and repeats them."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(CHECKPOINTS.format("*")):
        if number(path) > step:
            shutil.rmtree(path)


def prune(workdir: Path, *, keep: int, kept: Collection[int], used: Collection[str]) -> None:
    """Remove checkpoints from which steps continue, except the newest `keep`, those of the steps in `kept`, and `used`.

    `used` are directories that training needs, in a checkpoint or elsewhere.
    """
    found = [path for path in workdir.glob(f"verl-*/{CHECKPOINTS.format('*')}") if steps_of(path)]
    needed = [Path(each) for each in used if each]
    for path in sorted(found, key=steps_of)[:-keep]:
        is_kept = not set(kept).isdisjoint(steps_of(path))
        if not is_kept and not any(each.is_relative_to(path) for each in needed):
            shutil.rmtree(path, ignore_errors=True)


PREFIX, BASE = "base_model.model.", ".base_layer"
"""Prefix and infix that peft adds to the names of the model's weights."""

WHOLE = "model.safetensors"
"""Name of the file with the merged weights."""

MERGED = {"format": "pt", "merged": "lora"}
"""Metadata that marks a weights file as merged; transformers reads `format`."""


def say_precision(folder: Path) -> None:
    """Write the actual precision of the weights in `folder` into their `config.json`."""
    # All tensors of a checkpoint have one precision, so the first tensor of the first file shows it.
    with cast("Any", safe_open)(min(folder.glob("*.safetensors")), framework="pt") as file:
        precision = str(file.get_tensor(min(file.keys())).dtype).removeprefix("torch.")
    path, fresh = folder / "config.json", folder / "config.json.new"
    config = json.loads(path.read_text(encoding="utf-8"))
    fresh.write_text(json.dumps(config | {"dtype": precision}, indent=2), encoding="utf-8")
    fresh.rename(path)


def merge_saved(folder: Path, *, scaling: float) -> None:
    """Merge the adapters that VERL saved in `folder` into its weights; `scaling` is alpha / r.

    All weights are read into memory, and one file is written. Raises AglError if there are no adapters.
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
    """Return true if the file exists and holds weights with merged adapters."""
    if not file.is_file():
        return False
    with cast("Any", safe_open)(file, framework="pt") as opened:
        return opened.metadata() == MERGED


def merged(state: dict[str, Tensor], *, scaling: float) -> dict[str, Tensor]:
    """Return the weights with adapters merged, under the model's own tensor names."""
    whole: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".lora_A." in name or ".lora_B." in name:
            continue
        layer = name.removesuffix(f"{BASE}.weight")
        plain = name.removeprefix(PREFIX).replace(f"{BASE}.", ".")
        whole[plain] = tensor
        if f"{layer}.lora_A.default.weight" in state:
            # [out, in] = [out, r] @ [r, in]; the adapters may be in float32 over a base in bfloat16
            change = state[f"{layer}.lora_B.default.weight"] @ state[f"{layer}.lora_A.default.weight"]
            whole[plain] = tensor + (scaling * change).to(tensor.dtype)
    return whole
