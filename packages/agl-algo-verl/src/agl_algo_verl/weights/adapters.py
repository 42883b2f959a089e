"""LoRA adapters: extracted from VERL's engine to be published with their base, and merged to be trained further.

W = W_0 + (alpha / r) * B @ A        (LoRA, Hu et al. 2021, arXiv 2106.09685, section 4.1)
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import torch as safetensors

from agl.errors import ConfigError
from agl.schemas import Weights
from agl_algo_verl.typed import verl_part
from agl_objectives.adapters import HeldAdapter
from agl_objectives.directories import require_safetensors, write_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import Tensor

    from agl.contracts import AlgorithmContext


MERGED = "merged"
"""Name of the directory, in an algorithm's work folder, for merged weights."""


def adapter_of(module: Any, *, base: str, whole: Callable[[Any], Tensor]) -> HeldAdapter:
    """Return a copy of the adapter of a peft model that was loaded from `base`.

    `whole` returns the full tensor on the CPU for the part of it that this rank has.
    """
    parts = {name: whole(tensor).clone() for name, tensor in module.state_dict().items() if ".lora_" in name}
    # Without the last argument peft would look the base model up on the hub.
    tensors = verl_part("peft:get_peft_model_state_dict")(module, state_dict=parts, save_embedding_layers=False)
    return HeldAdapter(base=base, config=_described(module, base=base).to_dict(), tensors=tensors)


def write_adapter(directory: Path, module: Any, adapter: HeldAdapter) -> None:
    """Write an adapter in peft's format: its configuration, which names the base, and its tensors."""
    _described(module, base=adapter.base).save_pretrained(str(directory))
    tensors = {name: tensor.contiguous() for name, tensor in adapter.tensors.items()}
    cast("Any", safetensors).save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def whole_weights(weights: Weights, *, workdir: Path) -> Weights:
    """Return weights that can be trained in full: an adapter is merged into its base, once, in a folder of `workdir`.

    The sum is computed and stored in float32, because a base in bfloat16 would round away what the adapter has learned.
    Raises ConfigError if the adapter or its base cannot be read. Blocks.
    """
    if weights.format != "lora":
        return weights
    name = hashlib.sha256(f"{weights.uri}\n{weights.base_model}".encode()).hexdigest()[:16]
    target = workdir.absolute() / MERGED / name
    if not target.is_dir():
        write_directory(target, partial(_merge, weights))
    return Weights(uri=str(target), format="hf")


async def prune_merged(context: AlgorithmContext, *, name: str, used: Collection[str]) -> None:
    """Remove merged weights that nothing can continue from, because neither `used` nor a version names them.

    The versions considered are all versions of the resource and the newest of every other resource. This algorithm's
    own versions count only if their files still exist.
    """
    parent = context.workdir.absolute() / MERGED
    unused = {path.name: path for path in parent.glob("[0-9a-f]*")} if parent.is_dir() else {}
    for each in used:
        _spare(unused, each)
    store = context.store
    for version in [*await store.resources(name), *await store.resources()] if unused else ():
        weights = version.resource
        if isinstance(weights, Weights) and (version.algorithm != context.name or Path(weights.uri).is_dir()):
            _spare(unused, weights.uri)
            _spare(unused, weights.base_model)
    for path in unused.values():
        await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)


def _spare(unused: dict[str, Path], place: str) -> None:
    """Remove from `unused` every directory in the path `place`; compared by name, as the work folder may have
    aliases.
    """
    for part in Path(place).parts:
        unused.pop(part, None)


def _described(module: Any, *, base: str) -> Any:
    """Return peft's configuration of a module's adapter, with the name of the base and in inference mode."""
    found = copy.copy(module.peft_config["default"])
    found.base_model_name_or_path, found.inference_mode = base, True
    return found


def _merge(weights: Weights, directory: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        base = cast("Any", AutoModelForCausalLM).from_pretrained(
            weights.base_model, dtype=torch.float32, use_safetensors=True
        )
        require_safetensors(weights.uri)
        merged: Any = cast("Any", PeftModel).from_pretrained(base, weights.uri).merge_and_unload()
        has_tokenizer = (Path(weights.uri) / "tokenizer_config.json").is_file()
        tokenizer: Any = cast("Any", AutoTokenizer).from_pretrained(
            weights.uri if has_tokenizer else weights.base_model
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"The adapter {weights.uri} cannot be merged into its base {weights.base_model!r}: {error}. Give a peft "
            "adapter (adapter_config.json, adapter_model.safetensors) and the model that it was trained on."
        ) from error
    merged.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def tuned_policy(context: AlgorithmContext) -> tuple[str, Weights]:
    """Return the name and the weights of the only policy that is tuned.

    Raises ConfigError for several policies, for weights that cannot be trained from here, and if there are no tasks.
    """
    if len(context.tunes) != 1:
        raise ConfigError(
            f"verl trains the weights of one policy, but tunes {list(context.tunes)}. "
            'Give one name, such as tunes = "main_llm", and one [[algorithm]] per policy.'
        )
    if not context.train:
        raise ConfigError("verl needs training tasks, but the experiment has none. Set `train` to a dataset.")
    name = context.tunes[0]
    return name, own_weights(context.current(name).resource, name=name)


def own_weights(resource: Any, *, name: str) -> Weights:
    """Return the resource as weights; raises ConfigError if it is of another kind, which cannot be trained here."""
    if not isinstance(resource, Weights):
        raise ConfigError(
            f"The policy {name!r} is a {type(resource).__name__}, whose weights cannot be trained from here. "
            f'Serve weights: [policy.{name}] use = "torch".'
        )
    return resource
