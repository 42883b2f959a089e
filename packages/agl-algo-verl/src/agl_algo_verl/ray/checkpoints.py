"""The checkpoints that VERL on Ray leaves below an algorithm's directory: which are complete, and which stay.

Every start of VERL's trainer on other weights has a directory of its own, `verl-000007` after step 7, because VERL then
counts its steps from 1 again; below it VERL writes `global_step_N`. A checkpoint counts once `steps.json` in it names
the steps of the algorithm that continue from it: the one that trained it, and later ones that trained nothing. What
VERL saved and no step counts is removed when the run goes on.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agl.errors import AglError
from agl_algo_verl.ray.configuration import CHECKPOINTS, WEIGHTS
from agl_algo_verl.ray.saved_weights import merge_saved, say_precision
from agl_algo_verl.weights.probe import probe_files

if TYPE_CHECKING:
    from collections.abc import Collection

    from agl.schemas import Weights
    from agl_algo_verl.settings.ray import RaySettings

STARTS = "verl-{:06d}"
"""Directory of a start of VERL's trainer, by the steps that were done before."""

STEPS = "steps.json"

ORIGIN = "origin.json"
"""File in a checkpoint that names the weights which VERL was started on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsaved:
    """The checkpoint of a step that is not complete.

    Attributes:
        folder: Where VERL writes it, or has written it.
        is_written: VERL has written it at the end of its step.
        seconds: What that took.
    """

    folder: Path
    is_written: bool
    seconds: float


def weights_in(folder: Path, read: RaySettings) -> Path:
    """Return where the weights are in a checkpoint, in Hugging Face's format."""
    return folder / WEIGHTS[read.strategy]


def complete(weights: Weights, folder: Path, *, read: RaySettings, probes: bool) -> None:
    """Make what VERL wrote load as what was trained, and put a probe beside it; may be repeated after a failure.

    Raises AglError where VERL wrote nothing.
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


def count(folder: Path, *, step: int, origin: str = "") -> None:
    """Note that a step of the algorithm continues from a checkpoint of training that began on `origin`."""
    known = steps_of(folder)
    for name, content in ((ORIGIN, {"uri": origin}), (STEPS, [*known, *([] if step in known else [step])])):
        fresh = folder / f"{name}.new"
        fresh.write_text(json.dumps(content), encoding="utf-8")
        fresh.rename(folder / name)


def steps_of(folder: Path) -> list[int]:
    """Return the steps of the algorithm that continue from a checkpoint; none where it does not count."""
    file = folder / STEPS
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []


def origins(workdir: Path) -> list[str] | None:
    """Return the weights on which VERL was started, of all checkpoints that count; None where one does not say."""
    files = [path / ORIGIN for path in workdir.glob(f"verl-*/{CHECKPOINTS.format('*')}") if steps_of(path)]
    if not all(file.is_file() for file in files):
        return None
    return [json.loads(file.read_text(encoding="utf-8"))["uri"] for file in files]


def number(folder: Path) -> int:
    """Return VERL's number of the step that a checkpoint was saved after."""
    return int(folder.name.rpartition("_")[2])


def forget_after(folder: Path, *, step: int) -> None:
    """Remove what VERL saved after its `step`: those steps never counted as done for agl, and they are repeated."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(CHECKPOINTS.format("*")):
        if number(path) > step:
            shutil.rmtree(path)


def prune(workdir: Path, *, keep: int, kept: Collection[int], used: Collection[str]) -> None:
    """Remove the checkpoints that count, except the newest `keep`, those of the steps `kept`, and those with `used`.

    `used` are directories that training needs; each lies in a checkpoint, or elsewhere.
    """
    found = [path for path in workdir.glob(f"verl-*/{CHECKPOINTS.format('*')}") if steps_of(path)]
    needed = [Path(each) for each in used if each]
    for path in sorted(found, key=steps_of)[:-keep]:
        is_kept = not set(kept).isdisjoint(steps_of(path))
        if not is_kept and not any(each.is_relative_to(path) for each in needed):
            shutil.rmtree(path, ignore_errors=True)
