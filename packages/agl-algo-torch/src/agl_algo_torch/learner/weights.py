"""Weights of a policy server: reads them from disk, copies them from a model, checks them, and writes them in place."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from agl_algo_torch.learner.checkpoint import save_served
from agl_algo_torch.learner.model import LoadedModel, check_whole, load_model, open_adapter, served_state
from agl_algo_torch.learner.typed_torch import read_tensors
from agl_objectives.settings import Lora

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from agl.schemas import Weights


def read_weights(weights: Weights, *, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of `weights` under the names in `like`, the state dict of the model that will get them.

    An adapter is merged into its base model. Raises ConfigError if the weights are damaged or cannot be read.
    """
    if weights.format == "lora":
        base = load_model(weights.base_model, device="cpu").model
        return dict(open_adapter(base, weights.uri, settings=Lora()).state_dict())
    check_whole(weights.uri)
    files = sorted(Path(weights.uri).glob("*.safetensors"))
    state = {name: tensor for file in files for name, tensor in read_tensors(file).items()}
    if state and not misfits(like, state):
        return state
    # There are no such files, or their names need translation: let transformers read the directory.
    return dict(load_model(weights.uri, device="cpu").model.state_dict())


def write_merged(weights: Weights, target: Path) -> None:
    """Write weights to a Hugging Face directory, an adapter merged into its base, in the type of the base's files.

    Merging is computed in float32. Raises ConfigError as `load_model` and `open_adapter` do.
    """
    from transformers import AutoConfig

    is_adapter = weights.format == "lora"
    loaded = load_model(weights.base_model if is_adapter else weights.uri, device="cpu")
    model = open_adapter(loaded.model, weights.uri, settings=Lora()) if is_adapter else loaded.model
    kind = cast("Any", AutoConfig).from_pretrained(loaded.name).dtype
    save_served(replace(loaded, model=model.to(kind or torch.float32)), target)


def serving_copy(loaded: LoadedModel) -> LoadedModel:
    """Return a copy of the model for serving, in evaluation mode, with adapters merged."""
    model = cast("Any", loaded.model)
    base = copy.deepcopy(model.get_base_model() if hasattr(model, "peft_config") else model)
    if hasattr(model, "peft_config"):
        # The copy still contains peft's layers, so a fresh model of the same configuration takes the merged weights.
        plain = type(base)(base.config).to(device=loaded.device, dtype=base.dtype)
        plain.load_state_dict(served_state(loaded.model))
        base = plain
    return replace(loaded, model=base.eval())


def misfits(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    """Return the tensors because of which `state` does not fit a model: missing, unknown, or of another shape.

    The list is sorted, and empty if `state` fits the model's own state dict `own`. A tensor of `own` may be missing
    from `state` if it shares its memory with one that `state` has (a tied output layer).
    """
    given = {own[name].data_ptr() for name in state if name in own}
    missing = [f"{n} (missing)" for n, t in own.items() if n not in state and t.data_ptr() not in given]
    unknown = [f"{n} (unknown)" for n in state if n not in own]
    shapes = [
        f"{n} (shape {tuple(t.shape)}, not {tuple(own[n].shape)})"
        for n, t in state.items()
        if n in own and t.shape != own[n].shape
    ]
    return sorted(missing + unknown + shapes)


@torch.no_grad()
def copy_into(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Overwrite a model's tensors `own` in place with those of `state`, which must fit (see `misfits`)."""
    for name, tensor in state.items():
        own[name].copy_(tensor)
