"""The weights that a policy serves, swapped in place: all weights, or only a LoRA adapter while the base stays.

An adapter is served next to its base, as in training, unless the policy merges adapters. A new version then takes only
the time and memory of an adapter, and bfloat16 does not round away small changes. An adapter that is more than a pair
of low-rank matrices for each of its layers (DoRA, trained biases, embeddings) is always merged, by peft.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from agl.errors import ConfigError
from agl.schemas import Weights
from agl_algo_torch.learner.model import LoadedModel, has_lora, served_state, without_master
from agl_algo_torch.learner.typed_torch import modules, read_tensors
from agl_algo_torch.learner.weights import copy_into, misfits, read_weights
from agl_objectives.adapters import HeldAdapter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor
    from torch.utils.hooks import RemovableHandle

_PART = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
"""Name of a tensor in an adapter's file; the groups give the layer, and `A` or `B` for the matrix."""

_KNOWN = frozenset(
    {
        *("base_model_name_or_path", "auto_mapping", "revision", "peft_type", "peft_version", "task_type"),
        *("r", "lora_alpha", "use_rslora", "bias", "lora_dropout", "init_lora_weights", "inference_mode"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("megatron_core", "qalora_group_size"),  # without effect unless another field is set
    }
)
"""Fields of an adapter's configuration that are read here or have no effect on serving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter: the matrices A [rank, in] and B [out, rank] of every adapted layer, by the layer's name.

    The adapter changes a layer's weight by `delta W = B A * scale`.
    """

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """A change of weights.

    Attributes:
        base: The new weights of the base model; empty if the base stays.
        place: Directory or hub name of the base model; `""` if its weights came from memory.
        adapter: The new adapter; None for no adapter.
    """

    base: Mapping[str, Tensor] = field(default_factory=dict[str, "Tensor"])
    place: str = ""
    adapter: Adapter | None = None


class ServedWeights:
    """Prepares and applies swaps of the weights of one served model; only one swap at a time.

    With `merges` every adapter is merged into its base.
    """

    def __init__(self, loaded: LoadedModel, *, merges: bool = False) -> None:
        self._name = loaded.name
        self._model = loaded.model
        self._merges = merges
        self._place = _place(loaded.name)
        self._added: list[RemovableHandle] = []
        self._is_shared = False  # whether the memory of the base belongs to other models too

    @property
    def model(self) -> nn.Module:
        """The served model."""
        return self._model

    def beside(self, weights: Weights) -> ServedWeights:
        """Return a further model with the weights on disk; the two share the memory of the base while they can.

        Raises as `read` does. Blocks.
        """
        shared = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in self._model.parameters()}
        other = copy.copy(self)
        other._model, other._added = copy.deepcopy(self._model, cast("dict[int, Any]", shared)), []
        self._is_shared = other._is_shared = True
        if weights.format != "hf" or _place(weights.uri) != self._place:
            other.apply(other.read(weights))
        return other

    def read(self, weights: Weights) -> Swap:
        """Return the swap for weights on disk; raises ConfigError if they cannot be read or do not fit. Blocks."""
        is_beside = weights.format == "lora" and not self._merges
        adapter = _read_adapter(weights, self._model) if is_beside else None
        if adapter is None:
            return self.whole(read_weights(weights, like=self._model.state_dict()), place=_place(weights.uri))
        return self._beside(adapter, base=weights.base_model)

    def take(self, held: LoadedModel | Mapping[str, Tensor] | HeldAdapter) -> Swap:
        """Return the swap for weights in memory: a model, its state or adapter. Raises as `read` does. Blocks."""
        if isinstance(held, HeldAdapter):
            return self._adapted(held)
        if not isinstance(held, LoadedModel):
            return self.whole(held)
        if not has_lora(held.model):
            return self.whole(without_master(held).model.state_dict())
        adapter = None if self._merges else _held_adapter(held, self._model)
        return self.whole(served_state(held.model)) if adapter is None else self._beside(adapter, base=held.name)

    def _adapted(self, held: HeldAdapter) -> Swap:
        adapter = _adapter(held.config, held.tensors, self._model)
        if adapter is None:
            raise ConfigError(
                f"The adapter of {held.base!r} does not fit the model {self._name!r}: it is not made of two matrices "
                "for each of some linear layers. Serve the model that the adapter was trained on."
            )
        if not self._merges:
            return self._beside(adapter, base=held.base)
        state = dict(read_weights(Weights(uri=held.base), like=self._model.state_dict()))
        for name, (down, up) in adapter.pairs.items():
            layer = f"{name}.weight"
            state[layer] = (state[layer].float() + adapter.scale * up.float() @ down.float()).to(state[layer].dtype)
        return self.whole(state)

    def _beside(self, adapter: Adapter, *, base: str) -> Swap:
        place = _place(base)
        if place == self._place:
            return Swap(place=place, adapter=adapter)
        own = self._model.state_dict()
        return Swap(base=self._fitting(read_weights(Weights(uri=base), like=own)), place=place, adapter=adapter)

    def whole(self, state: Mapping[str, Tensor], *, place: str = "") -> Swap:
        """Return the swap that replaces all weights; raises ConfigError unless names and shapes fit the model."""
        return Swap(base=self._fitting(state), place=place)

    def apply(self, swap: Swap) -> None:
        """Apply a swap to the model, which must not compute at the same time."""
        if swap.base:
            self._place = ""  # an error would leave the base partly written
            self._own_base()
            copy_into(self._model.state_dict(), swap.base)
        self._place = swap.place
        for handle in self._added:
            handle.remove()
        self._added = [] if swap.adapter is None else _add(self._model, swap.adapter)

    def _own_base(self) -> None:
        """Give the base memory of its own before it is overwritten, because other models still compute with it."""
        for parameter in self._model.parameters() if self._is_shared else ():
            parameter.data = parameter.data.clone()
        self._is_shared = False

    def _fitting(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        problems = misfits(self._model.state_dict(), state)
        if problems:
            raise ConfigError(
                f"The weights do not fit the model {self._name!r}: {len(problems)} tensors differ, first "
                f"{problems[0]}. Publish the state of a model with the same configuration."
            )
        return state


def _place(name: str) -> str:
    """Return the absolute path of a directory, so that paths can be compared; a hub name is returned unchanged."""
    path = Path(name)
    return str(path.resolve()) if path.is_dir() else name


def _read_adapter(weights: Weights, model: nn.Module) -> Adapter | None:
    """Return the adapter on disk; `None` unless it consists of pairs of matrices that fit the model's linear layers."""
    folder = Path(weights.uri)
    try:
        config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # peft, which reads it next, raises the error
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in read_tensors(file).items()}
    return _adapter(config, tensors, model)


def _held_adapter(held: LoadedModel, model: nn.Module) -> Adapter | None:
    """Return a copy of the adapter of a model in memory; `None` in the cases of `_read_adapter`."""
    import peft

    config: dict[str, Any] = cast("Any", held.model).peft_config["default"].to_dict()
    state: dict[str, Tensor] = cast("Any", peft).get_peft_model_state_dict(
        held.model,
        save_embedding_layers=False,  # otherwise peft adds all weights of the head to an adapter of the head
    )
    return _adapter(config, {name: tensor.detach().clone() for name, tensor in state.items()}, model)


def _adapter(config: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module) -> Adapter | None:
    """Return the adapter with this configuration and tensors; `None` in the cases of `_read_adapter`."""
    if config.get("bias", "none") != "none" or any(value for name, value in config.items() if name not in _KNOWN):
        return None
    halves: dict[str, dict[str, Tensor]] = {"A": {}, "B": {}}
    for name, tensor in tensors.items():
        found = _PART.fullmatch(name)
        if found is None:
            return None
        halves[found[2]][found[1]] = tensor
    rank = int(config["r"])
    layers = dict(modules(model))
    if not halves["A"] or halves["A"].keys() != halves["B"].keys():
        return None
    pairs = {name: (down, halves["B"][name]) for name, down in halves["A"].items()}
    if not all(_fits(layers.get(name), down, up, rank=rank) for name, (down, up) in pairs.items()):
        return None
    return Adapter(pairs=pairs, scale=float(config["lora_alpha"]) / (sqrt(rank) if config.get("use_rslora") else rank))


def _fits(layer: nn.Module | None, down: Tensor, up: Tensor, *, rank: int) -> bool:
    return (
        isinstance(layer, nn.Linear)
        and down.shape == (rank, layer.in_features)
        and up.shape == (layer.out_features, rank)
    )


def _add(model: nn.Module, adapter: Adapter) -> list[RemovableHandle]:
    """Make every adapted layer add its `delta W` to the output; returns handles that remove this again."""
    layers = dict(modules(model))
    return [
        layers[name].register_forward_hook(_LowRank(down, up * adapter.scale, like=layers[name]))
        for name, (down, up) in adapter.pairs.items()
    ]


class _LowRank:
    """Forward hook of a linear layer that adds the product of input and two low-rank matrices to the output."""

    def __init__(self, down: Tensor, up: Tensor, *, like: nn.Module) -> None:
        device = next(like.parameters()).device
        self._down = down.to(device).t()  # [in, rank]
        self._up = up.to(device).t()  # [rank, out]

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        """Return a hook that adds nothing: a copy of a model is one of its base."""
        return _no_change

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        del layer
        rows = inputs[0].reshape(-1, self._down.shape[0]).to(self._down.dtype)
        low = rows @ self._down
        flat = output.reshape(-1, output.shape[-1])
        if output.dtype == low.dtype:
            return torch.addmm(flat, low, self._up).view_as(output)
        return (flat + low @ self._up).to(output.dtype).view_as(output)


def _no_change(_layer: nn.Module, _inputs: tuple[Tensor], _output: Tensor) -> None:
    pass
