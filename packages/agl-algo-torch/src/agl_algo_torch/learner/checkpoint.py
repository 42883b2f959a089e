"""Saves weights and optimizer state as safetensors and JSON, never as pickle, and never half a checkpoint.

A directory is filled under a temporary name, flushed and renamed, so a directory with the final name is complete.
There are two kinds: one to serve from (`save_served`: a Hugging Face directory, or a peft adapter) and one to continue
training from (`save_training`: trainable tensors, AdamW moments, the update count).
Only this module, `transformers` and `peft` read these files.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch

from agl.errors import ConfigError
from agl.schemas import Weights, WeightsProbe, write_probe
from agl_algo_torch.learner.adamw8bit import AdamW8bit, converted
from agl_algo_torch.learner.model import has_lora, load_trainable_state, no_bars, trainable_state, without_master
from agl_algo_torch.learner.quantized import quantized_layers
from agl_algo_torch.learner.typed_torch import read_tensors, write_tensors
from agl_objectives.directories import damage, write_directory

if TYPE_CHECKING:
    from torch import Tensor, nn

    from agl_algo_torch.learner.model import LoadedModel

FORMAT = 1
"""Version of the training checkpoint's layout."""

SHARD = "5GB"
"""Size of a file of weights; larger models are written as several files with an index."""

STATE_FILE = "state.json"
"""File of a training checkpoint with everything but tensors."""


def save_served(loaded: LoadedModel, target: Path) -> Weights:
    """Write the weights for a policy server to `target`, and return the resource that names the files.

    Full weights are written as a Hugging Face directory with the tokenizer and the settings of a picture processor, in
    the type that the model computes in.
    LoRA is written as a peft adapter that names its base model. The directory also gets a probe
    (`agl.schemas.WeightsProbe`): the model's log-probabilities of a fixed text, by which a server of these weights can
    be checked; an adapter on a quantised base gets none, because the server has the base as it was.
    """
    loaded = without_master(loaded)
    model = cast("Any", loaded.model)
    # Otherwise peft adds all weights of the head or the embedding to an adapter that has either as a target.
    options: dict[str, Any] = {"save_embedding_layers": False} if has_lora(model) else {"max_shard_size": SHARD}

    def fill(directory: Path) -> None:
        with no_bars():
            model.save_pretrained(directory, **options)
        loaded.tokenizer.save_pretrained(directory)
        for name, content in loaded.processor_files.items():
            (directory / name).write_bytes(content)
        if not quantized_layers(model) and (probe := make_probe(loaded)) is not None:
            write_probe(directory, probe)

    write_directory(target, fill)
    return served_weights(loaded, target)


def served_weights(loaded: LoadedModel, target: Path) -> Weights:
    """Return the resource for the files that `save_served` writes to `target`; they need not exist yet."""
    if has_lora(loaded.model):
        return Weights(uri=str(target), base_model=loaded.name, format="lora")
    return Weights(uri=str(target), format="hf")


def save_training(
    target: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer, updates: int, origin: Weights
) -> None:
    """Write a checkpoint to continue training from; `origin` is the resource from which the model was loaded."""
    moments, steps = _optimizer_tensors(model, optimizer)

    def fill(directory: Path) -> None:
        write_tensors(trainable_state(model), directory / "trainable.safetensors")
        write_tensors(moments, directory / "optimizer.safetensors")
        state = {"format": FORMAT, "updates": updates, "origin": msgspec.to_builtins(origin), "steps": steps}
        (directory / STATE_FILE).write_text(json.dumps(state, indent=1), encoding="utf-8")

    write_directory(target, fill)


def read_origin(source: Path, *, is_checked: bool = False) -> Weights:
    """Return the resource that the model of a training checkpoint was opened from; raises as `load_training` does."""
    return msgspec.convert(_read_state(source, is_checked=is_checked)["origin"], Weights)


def load_training(source: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer, is_checked: bool = False) -> int:
    """Restore model and optimizer in place from a checkpoint of `save_training`; returns the number of updates done.

    The optimizer's present moments are dropped, and so are gradients that no update has used. Moments of an optimizer
    with another number of bits are converted. `is_checked` says that the caller has already looked for damage, which
    reads every file.
    Raises ConfigError if there is no checkpoint, it is damaged, its format is newer than this version, or it is of
    another model.
    """
    state = _read_state(source, is_checked=is_checked)
    load_trainable_state(model, read_tensors(source / "trainable.safetensors"))
    moments: dict[str, dict[str, Tensor]] = {}
    for key, tensor in read_tensors(source / "optimizer.safetensors").items():
        name, _, moment = key.rpartition("/")
        moments.setdefault(name, {})[moment] = tensor
    names = _parameter_names(model)
    optimizer.zero_grad(set_to_none=True)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            if name not in state["steps"]:  # AdamW keeps no moments for a parameter that never had a gradient
                continue
            # The fused optimizer needs the step count on the parameter's device, the others on the CPU.
            where = parameter.device if group.get("fused") else torch.device("cpu")
            own = converted(moments[name], parameter, is_8bit=isinstance(optimizer, AdamW8bit))
            optimizer.state[parameter] = {"step": torch.tensor(float(state["steps"][name]), device=where)} | {
                moment: tensor.to(parameter.device) for moment, tensor in own.items()
            }
    return int(state["updates"])


def keep_start(origin: Weights, target: Path) -> Weights:
    """Copy the files of `origin` to `target`, so that no other algorithm removes them; returns the copy's resource.

    Files are hard-linked if the file system can, so the copy takes no space while the original exists.
    """
    source = Path(origin.uri)

    def fill(directory: Path) -> None:
        for path in source.iterdir():
            try:
                os.link(path, directory / path.name)
            except OSError:  # another file system, or one without links
                shutil.copy2(path, directory / path.name)

    write_directory(target.absolute(), fill)
    return msgspec.structs.replace(origin, uri=str(target.absolute()))


def _read_state(source: Path, *, is_checked: bool) -> dict[str, Any]:
    if not is_checked and (found := damage(source, state=STATE_FILE)):
        raise ConfigError(
            f"There is no whole training checkpoint in {source}: {found}. "
            "Resume where the run's files are, or start the run under a new name."
        )
    state = cast("dict[str, Any]", json.loads((source / STATE_FILE).read_text(encoding="utf-8")))
    if state["format"] > FORMAT:
        raise ConfigError(
            f"The checkpoint {source} has format {state['format']}, but this version reads formats up to {FORMAT}. "
            "Upgrade agl-algo-torch."
        )
    return state


def _parameter_names(model: nn.Module) -> dict[Any, str]:
    return {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}


def _optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return AdamW's moments as tensors by name, and each parameter's number of updates."""
    moments: dict[str, Tensor] = {}
    steps: dict[str, float] = {}
    for parameter, name in _parameter_names(model).items():
        state = optimizer.state.get(parameter)
        if not state:
            continue
        steps[name] = float(state["step"])
        moments |= {f"{name}/{moment}": tensor for moment, tensor in state.items() if moment != "step"}
    return moments, steps


_TEXT = "Seven times eight is fifty-six: 7*8=56. A list in Python, [1, 2, 3], has three items."
_MOST_TOKENS = 48
_FEWEST_TOKENS = 8


@torch.no_grad()
def make_probe(loaded: LoadedModel) -> WeightsProbe | None:
    """Return the model's log-probabilities of a fixed text, adapters included, in nats.

    Runs one forward pass of at most 48 tokens in evaluation mode and restores the model's mode. Returns None if the
    tokenizer splits the text into too few tokens to identify a model.
    """
    token_ids = list(loaded.tokenizer.encode(_TEXT, add_special_tokens=False))[:_MOST_TOKENS]
    if len(token_ids) < _FEWEST_TOKENS:
        return None
    model = cast("Any", loaded.model)
    was_training = model.training
    model.eval()
    try:
        ids_T = torch.tensor(token_ids, device=loaded.device)  # [T]
        logp_TV = model(input_ids=ids_T[None]).logits[0, :-1].float().log_softmax(-1)  # [T - 1, V]
    finally:
        model.train(was_training)
    logp_T = logp_TV.gather(-1, ids_T[1:, None])[:, 0]  # [T - 1]; the first token is not predicted
    return WeightsProbe(token_ids=tuple(token_ids), logprobs=tuple(logp_T.tolist()))
