"""Loads a causal language model for training, with full weights or a LoRA adapter, and gives the weights to serve.

A model is a directory or hub name in Hugging Face's format; nothing here knows an architecture. It may read pictures
too; its vision tower, the network that turns pixels into states, is then frozen unless the settings train it.
Optimizers are in `optim`, files on disk in `checkpoint`, sampling in `engine`.

Limits: one device.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping  # noqa: TC003 - the check of a policy's parameters resolves it
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from agl import PluginManager
from agl.contracts import Modality  # noqa: TC001 - the check of a policy's parameters resolves it
from agl.errors import ConfigError
from agl.hints import pip_install
from agl_algo_torch.learner.quantized import quantize, quantized_layers
from agl_algo_torch.learner.typed_torch import modules
from agl_objectives.directories import damage, require_safetensors

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from torch import Tensor

    from agl_objectives.settings import Lora

_COMPUTED = "agl_computed_dtype"
"""Name of an attribute that marks a master, a model that holds float32 weights; its value is the computing type."""

_CHECKPOINTS = "agl_checkpoints_gradients"
"""Name of an attribute that is true for a model with gradient checkpointing."""

BANNED = "agl_banned_ids"
"""Name of an attribute with the ids of tokens that stand for pictures, [K] int64; absent in models of text."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A causal LM and its tokenizer on one device; `name` is the directory or hub name from which it was loaded.

    `processor_files` has the settings of the picture processor, by file name; it is empty for a model of text.
    `modality` reads pictures; it is None for a model of text, and where no plugin reads pictures.
    """

    name: str
    model: nn.Module
    tokenizer: Any
    device: torch.device
    processor_files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    modality: Modality | None = None

    @property
    def context_length(self) -> int:
        """Largest number of tokens, prompt plus response, for which the model has positions."""
        config = cast("Any", self.model).config
        return int(config.get_text_config().max_position_embeddings)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end a response: the tokenizer's end of sequence, and those of the generation config."""
        configured: Any = cast("Any", self.model).generation_config.eos_token_id
        ids = cast("list[Any]", configured if isinstance(configured, list) else [configured])
        return frozenset(int(i) for i in (*ids, self.tokenizer.eos_token_id) if i is not None)


@contextmanager
def no_bars() -> Generator[None]:
    """Switch off transformers' progress bars inside the block; the experiment draws its own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def pick_device(name: str = "auto") -> torch.device:
    """Return the device named `name`; "auto" is the first GPU if torch can use one, else the CPU."""
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_model(
    path: str, *, device: str = "auto", dtype: str = "float32", is_master: bool = False, is_quantized: bool = False
) -> LoadedModel:
    """Load model and tokenizer from a directory or hub name, in evaluation mode.

    With `is_master` the model holds its weights in float32 and computes in `dtype` inside `computing`; otherwise it
    holds them in `dtype`. An update of AdamW moves a weight by about `lr`, and bfloat16 would round this away for a
    weight more than 256 times as large. With `is_quantized` the linear layers are frozen and stored in 4 bits.

    Raises ConfigError if `dtype` is unknown, the model is damaged or cannot be read, or it has no chat template.
    """
    from transformers import AutoConfig, AutoTokenizer

    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown for model {path!r}. Use one of: {', '.join(DTYPES)}.")
    where, held = pick_device(device), torch.float32 if is_master else DTYPES[dtype]
    check_whole(path)
    try:
        if _is_absent(path):  # otherwise transformers would ask the hub for it, several times
            raise OSError("there is no such directory")
        with no_bars():
            tokenizer = cast("Any", AutoTokenizer).from_pretrained(path)
            # A pickle from elsewhere is never read.
            architecture = _architecture(cast("Any", AutoConfig).from_pretrained(path))
            model = architecture.from_pretrained(path, dtype=held, use_safetensors=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The model {path!r} cannot be loaded: {error}. "
            "Give a directory in Hugging Face's format (config.json, model.safetensors, tokenizer.json) or a hub name. "
            "Weights of a run are found only while its work directory has the path at which the run wrote them."
        ) from error
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"The tokenizer of {path!r} has no chat template, so messages cannot be turned into tokens. "
            "Use an instruction-tuned model, or add chat_template.jinja next to its tokenizer.json."
        )
    if is_quantized:
        quantize(model, device=where)
    if held != DTYPES[dtype]:
        setattr(model, _COMPUTED, DTYPES[dtype])
    files = _processor_files(path) if vision_tower(model) is not None else {}
    modality = _modality(path, model.config.model_type) if files else None
    if modality is not None:
        setattr(model, BANNED, torch.tensor(sorted(modality.banned)))
    return LoadedModel(
        name=path,
        model=model.to(where).eval(),
        tokenizer=tokenizer,
        device=where,
        processor_files=files,
        modality=modality,
    )


def _modality(path: str, model_type: str) -> Modality | None:
    """Return the modality of the model's type, else that of transformers' processors; None if neither is installed."""
    plugins = PluginManager.from_environment()
    entries = {entry.name: entry for entry in plugins.entries("modality")}
    entry = entries.get(model_type.replace("_", "-")) or entries.get("transformers")
    return plugins.build(entry, model=path) if entry else None


def _processor_files(path: str) -> dict[str, bytes]:
    """Return the files with the settings of a model's processors, which weights that are saved later need again."""
    from transformers.utils import hub

    find = partial(cast("Any", hub).cached_file, path, _raise_exceptions_for_missing_entries=False)
    names = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
    found = {name: find(name) for name in names}
    return {name: Path(file).read_bytes() for name, file in found.items() if file is not None}


def _architecture(config: Any) -> Any:
    """Return the class of transformers that loads a language model with its head and any vision tower."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def vision_tower(model: nn.Module) -> nn.Module | None:
    """Return the network of a Hugging Face model that reads pixels; None for a model of text."""
    base: Any = cast("Any", model).get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(base.config, "vision_config"):
        return None
    found = base.get_encoder("image")
    return None if found is base or found is base.base_model else found


@contextmanager
def computing(model: nn.Module) -> Generator[None]:
    """Inside the block, compute as training does: in a master's `dtype`, with gradient checkpointing if it is on."""
    with _autocast(model), _checkpointed(model):
        yield


def computed_dtype(model: nn.Module) -> torch.dtype:
    """Return the type in which the model computes inside `computing`: a master's `dtype`, or that of its weights."""
    return getattr(model, _COMPUTED, None) or next(model.parameters()).dtype


def _autocast(model: nn.Module) -> AbstractContextManager[None]:
    dtype = getattr(model, _COMPUTED, None)
    if dtype is None:
        return nullcontext()
    return cast("AbstractContextManager[None]", torch.autocast(next(model.parameters()).device.type, dtype=dtype))


@contextmanager
def _checkpointed(model: nn.Module) -> Generator[None]:
    """Inside the block, set `training` on the layers to recompute, as transformers requires. Dropout stays off."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    is_on = getattr(model, _CHECKPOINTS, False) and torch.is_grad_enabled()
    layers: list[Any] = [layer for _, layer in modules(model) if isinstance(layer, GradientCheckpointingLayer)]
    before = [(layer, layer.training, layer._gradient_checkpointing_func) for layer in layers] if is_on else []
    for layer, mode, recompute in before:
        layer.training = True  # `train()` would also switch on the dropout inside the layer
        layer._gradient_checkpointing_func = partial(_recompute_evaluated, layer, mode, recompute)
    try:
        yield
    finally:
        for layer, mode, recompute in before:
            layer.training, layer._gradient_checkpointing_func = mode, recompute


def _recompute_evaluated(layer: Any, mode: bool, recompute: Callable[..., Any], compute: Any, *inputs: Any) -> Any:
    """Let transformers' `recompute` run a layer with `training` set to `mode`, in the forward and the backward pass.

    Some layers apply dropout by their own `training` flag. Without this they would do so in the first pass only.
    """

    def computed(*again: Any) -> Any:
        marked, layer.training = layer.training, mode
        try:
            return compute(*again)
        finally:
            layer.training = marked

    return recompute(computed, *inputs)


def checkpoint_gradients(model: nn.Module) -> None:
    """Make a model keep only the inputs of each layer and recompute the layer in the backward pass (Chen et al. 2016).

    Raises ConfigError for a model whose layers do not support this.
    """
    base: Any = cast("Any", model).get_base_model() if has_lora(model) else model
    if not base.supports_gradient_checkpointing:
        raise ConfigError(
            f"compute.gradient_checkpointing is on, and the layers of {type(base).__name__} cannot be computed again "
            "in the backward pass. Remove it, and lower compute.token_budget if memory is short."
        )
    # transformers 5.23 renamed the method, with its one argument.
    enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    setattr(model, _CHECKPOINTS, True)


def without_master(loaded: LoadedModel) -> LoadedModel:
    """Return the model to serve: for a master, a copy in its computing type; for other models, the model itself."""
    dtype = getattr(loaded.model, _COMPUTED, None)
    if dtype is None:
        return loaded
    served = copy.deepcopy(loaded.model).to(dtype)
    delattr(served, _COMPUTED)
    return replace(loaded, model=served)


def _is_absent(model: str) -> bool:
    """Return true if `model` is the path of a directory that does not exist, and not a hub name."""
    path = Path(model)
    # "org/name" may be a directory or a hub name; it is taken for a directory if `org` exists here.
    is_place = model.startswith((".", "/")) or (len(path.parts) > 1 and path.parent.is_dir())
    return is_place and not path.is_dir()


def check_whole(model: str) -> None:
    """Raise ConfigError if weights in the directory `model` differ from their checksums; hub names have none.

    Other files may be edited, such as the chat template.
    """
    if Path(model).is_dir() and (found := damage(Path(model), state="", suffix=".safetensors")):
        raise ConfigError(
            f"The weights in {model} are damaged: {found}. "
            "Restore the file or use other weights; if you changed it yourself, remove checksums.sha256 there."
        )


def add_lora(model: nn.Module, settings: Lora) -> nn.Module:
    """Return `model` with trainable adapters and frozen base weights, in evaluation mode (needs the extra `lora`).

    A vision tower gets no adapters.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError(
            f"LoRA was asked for, but peft is not installed. Run: {pip_install('agl-algo-torch[lora]')}"
        ) from error
    every = settings.targets == ("all-linear",)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=cast("int", settings.alpha),
        target_modules="all-linear" if every else list(settings.targets),
        exclude_modules=_inside_vision_tower(model),
        task_type="CAUSAL_LM",
    )
    return cast("nn.Module", get_peft_model(cast("Any", model), config)).eval()  # peft's own dropout is on at first


def _inside_vision_tower(model: nn.Module) -> str | None:
    """Return a regular expression for the names of the vision tower's modules; None without a tower."""
    tower = vision_tower(model)
    return next((rf"{re.escape(name)}\..*" for name, module in modules(model) if module is tower), None)


def open_adapter(model: nn.Module, path: str, *, settings: Lora) -> nn.Module:
    """Return `model` with the trainable adapter in `path`, in evaluation mode.

    With rank 0 in `settings` the adapter is merged, and all weights are trainable.
    Raises ConfigError if the adapter is damaged or does not fit the model, if its rank, alpha or targets differ from
    the settings, or if peft is missing.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ConfigError(
            f"The weights {path} are a LoRA adapter, but peft is not installed. "
            f"Run: {pip_install('agl-algo-torch[lora]')}"
        ) from error
    check_whole(path)
    require_safetensors(path)
    try:
        adapted = cast("Any", PeftModel).from_pretrained(model, path, is_trainable=bool(settings.rank))
    except (ValueError, RuntimeError) as error:  # peft's for targets that the model lacks, and for other shapes
        raise ConfigError(f"The LoRA adapter {path} does not fit {type(model).__name__}: {error}") from error
    # peft only warns: a layer without a tensor keeps the start of an adapter, which changes nothing.
    names = adapted.load_adapter(path, "default", is_trainable=bool(settings.rank))
    if names.missing_keys or names.unexpected_keys:
        raise ConfigError(
            f"The LoRA adapter {path} does not fit {type(model).__name__}. Tensors that its files lack: "
            f"{names.missing_keys}. Tensors without a layer in the model: {names.unexpected_keys}. "
            "Use the model that the adapter was trained on."
        )
    if not settings.rank:
        return cast("nn.Module", adapted.merge_and_unload()).eval().requires_grad_(requires_grad=True)
    found = adapted.peft_config["default"]
    _check_adapter(adapted, found, settings, path)
    return cast("nn.Module", adapted).eval()


def refuse_tied_adapters(model: nn.Module) -> None:
    """Raise ConfigError for an adapter on the head or the embedding of a model in which both share their weights.

    Such an adapter trains only its own layer. Merged into the shared weights it would also change the other layer.
    """
    base = cast("Any", model).get_base_model()
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    if head is None or head.weight is not embedding.weight or not any(map(_is_adapted, (head, embedding))):
        return
    raise ConfigError(
        f"lora.targets has the output layer or the embedding of {type(base).__name__}, which share their weights in "
        'this model. Leave both out; "all-linear" does.'
    )


def _is_adapted(layer: nn.Module) -> bool:
    return hasattr(layer, "lora_A")


def _check_adapter(adapted: Any, found: Any, settings: Lora, path: str) -> None:
    """Raise ConfigError unless the adapter's rank, alpha and targets are those of the settings."""
    targets = cast("tuple[str, ...]", tuple(sorted(found.target_modules)))
    every = settings.targets == ("all-linear",)
    fits = not _left_out(adapted) if every else set(settings.targets) == set(targets)
    if fits and (settings.rank, settings.alpha) == (found.r, found.lora_alpha):
        return
    raise ConfigError(
        f"The policy starts from a LoRA adapter of rank {found.r} and alpha {found.lora_alpha:g} on "
        f"{', '.join(targets)} ({path}), and lora.rank = {settings.rank}, lora.alpha = {settings.alpha:g}, "
        f"lora.targets = {list(settings.targets)} ask for another. Give the adapter's own values to train it on, or "
        "lora.rank = 0 to merge it and train all weights."
    )


def _left_out(adapted: Any) -> list[str]:
    """Return the names of the linear layers, except the head and the vision tower's, that have no adapter."""
    base = adapted.get_base_model()
    head = base.get_output_embeddings()
    tower = vision_tower(base)
    adapters = [module for _, module in modules(base) if hasattr(module, "get_delta_weight") or module is tower]
    inside = {id(part) for adapter in adapters for _, part in modules(adapter)}
    return [
        name
        for name, module in modules(base)
        if isinstance(module, nn.Linear) and module is not head and id(module) not in inside
    ]


def has_lora(model: nn.Module) -> bool:
    """Return true if `model` has LoRA adapters."""
    return hasattr(model, "peft_config")


def trainable_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that training changes, by parameter name; they share memory with the parameters."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def load_trainable_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Copy `state` into the trainable parameters; raises ConfigError unless names and shapes agree."""
    own = trainable_state(model)
    odd = sorted(own.keys() ^ state.keys()) or [n for n in own if own[n].shape != state[n].shape]  # ^: in one only
    if odd:
        raise ConfigError(
            f"The checkpoint does not fit the model: {len(odd)} tensors differ, first {odd[0]!r}. "
            "Resume with the model and LoRA settings that wrote it, or start a new run."
        )
    with torch.no_grad():
        for name, target in own.items():
            target.copy_(state[name])


def served_state(model: nn.Module) -> dict[str, Tensor]:
    """Return a detached copy of the weights to serve, with adapters merged, under the base model's parameter names.

    W + delta W is computed separately, because peft's merge and unmerge would leave rounding errors in the weights that
    train. If adapters are more than pairs of matrices (DoRA, trained modules), peft merges a copy of the model.
    """
    if not has_lora(model):
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if _is_more_than_pairs(model):
        merged = cast("Any", copy.deepcopy(model)).merge_and_unload()
        return {name: tensor.detach() for name, tensor in merged.state_dict().items()}
    return {name: tensor for name, tensor in _merged(cast("Any", model).get_base_model())}


def _is_more_than_pairs(model: nn.Module) -> bool:
    """Return true if any trained tensor is neither one of a LoRA adapter's two matrices nor a bias."""
    return any(not re.search(r"\.lora_[AB]\.|\.bias$", name) for name in trainable_state(model))


def _merged(base: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the base model by its plain name, as a copy with the adapters' delta added."""
    deltas: dict[str, Tensor] = {}
    # delta W = B A * alpha / rank for each adapted layer, [out, in]; active adapters add up.
    for name, module in modules(base):
        if hasattr(module, "get_delta_weight"):
            layer = cast("Any", module)
            deltas[f"{name}.weight"] = torch.stack([layer.get_delta_weight(a) for a in layer.active_adapters]).sum(0)
    stored = quantized_layers(base)
    full = {f"{name}.weight": partial(layer.full, base.dtype) for name, layer in stored.items()}
    left_out = {f"{name}.scale" for name in stored}
    for name, tensor in base.state_dict().items():
        if ".lora_" in name or name in left_out:
            continue
        plain = name.replace(".base_layer.", ".")  # peft moves an adapted layer's own weight one level down
        value = full[name]() if name in full else tensor.detach().clone()
        yield plain, value + deltas[plain].detach() if plain in deltas else value


def _frozen(model: nn.Module) -> nn.Module:
    """Return a copy that is not trained; the layers of a master hold only the numbers that they compute with.

    In every pass of a master, autocast rounds the weights of its linear layers to the computing type. The embedding and
    the norms compute in float32, and the head may share the embedding's weights.
    """
    copied = copy.deepcopy(model).eval().requires_grad_(requires_grad=False)
    whole = cast("Any", copied)
    embedding, head = whole.get_input_embeddings(), whole.get_output_embeddings()
    if dtype := getattr(model, _COMPUTED, None):
        for _, layer in modules(copied):
            if isinstance(layer, nn.Linear) and layer is not head and layer.weight is not embedding.weight:
                layer.to(dtype)
    return copied


class Reference:
    """The frozen reference policy of a KL penalty or of DPO: `model` as it was at construction.

    Under LoRA this holds a copy of the adapters, which replaces the trained adapters inside `active`. Otherwise it
    holds a copy of the whole model, which computes exactly what the model computed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copy = None if has_lora(model) else _frozen(model)
        self._adapters = {name: tensor.clone() for name, tensor in trainable_state(model).items()}
        if self._copy is not None:
            self._adapters.clear()

    @contextmanager
    def active(self) -> Generator[nn.Module]:
        """Yield the reference model; under LoRA this is `model` itself, with the frozen adapters swapped in."""
        with torch.no_grad(), nullcontext() if self._copy is not None else self._swapped():
            yield self._copy if self._copy is not None else self._model

    @contextmanager
    def _swapped(self) -> Generator[None]:
        """Replace the trained adapters by the frozen ones inside the block.

        Tensors are exchanged and not overwritten: a graph that was recorded before still needs the trained ones.
        """
        own = {name: p for name, p in self._model.named_parameters() if name in self._adapters}
        trained = {name: p.data for name, p in own.items()}
        try:
            for name, p in own.items():
                p.data = self._adapters[name]
            yield
        finally:
            for name, p in own.items():
                p.data = trained[name]
