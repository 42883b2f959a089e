"""Computes the memory and the time of a step for a model on a device; nothing is measured.

Memory. Weights in training, their gradients and the two moments of AdamW are float32, 4 bytes each; moments in 8 bits
take 1 byte and a scale per block of 256. Under LoRA the base is frozen in ``dtype``; otherwise a pass in bfloat16 also
holds the weights in that type. Policy and critic train one after the other, so only one of them has gradients at a
time. The activations that a pass keeps for its gradient are counted tensor by tensor, for a decoder
layer of transformers with fused attention. They are 6 h + 3 q + 2 k + 4 f numbers per token and layer, where h is the
hidden size, q the total width of the queries, k that of the keys, and f the width of the feed-forward network. In
float32 each number takes 4 bytes; with bfloat16 only the norms stay in float32. With gradient checkpointing only h
numbers per layer are kept, and one layer at a time is computed again. Korthikanti et al. 2022 (arXiv 2205.05198) count
likewise. Logits are computed in chunks; four copies of a chunk are in memory at once.

Time. An operation takes as long as its arithmetic or its memory traffic, whichever is longer (Williams et al. 2009,
"Roofline"). Implementations reach only a share of the device's rates; :class:`Efficiency` has these shares. A token
costs 2 operations per weight in a forward pass and 4 in a backward pass (Kaplan et al. 2020, arXiv 2001.08361), and
attention costs 4 q operations per layer for each earlier token.
"""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl.schemas import Record
from agl_inspect.forecast.fitting import SETTABLE, VERL, cheapest_change
from agl_inspect.forecast.models import ModelShape
from agl_inspect.forecast.observed import Observed
from agl_inspect.forecast.queueing import StepForecast, forecast


class Device(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A device with its published memory and rates.

    Attributes:
        name: The name that ``--device`` takes.
        title: The full name.
        memory: Size of the memory in bytes.
        bandwidth: Bandwidth of the memory in bytes per second.
        flops: Operations per second in dense matrix products in bfloat16.
        source: The document that gives the figures.
    """

    name: str
    title: str
    memory: float
    bandwidth: float
    flops: float
    source: str


_GB, _TB, _TFLOPS = 1e9, 1e12, 1e12


def _nvidia(name: str, title: str, memory: float, bandwidth: float, flops: float) -> Device:
    return Device(
        name=name,
        title=f"NVIDIA {title}",
        memory=memory * _GB,
        bandwidth=bandwidth * _GB,
        flops=flops * _TFLOPS,
        source=f"NVIDIA, data sheet of the {title}",
    )


DEVICES = (
    _nvidia("h100", "H100 SXM", 80, 3350, 989.5),
    _nvidia("h100-pcie", "H100 PCIe", 80, 2000, 756),
    _nvidia("h200", "H200 SXM", 141, 4800, 989.5),
    _nvidia("b200", "B200 SXM", 180, 8000, 2250),
    _nvidia("a100-80", "A100 80 GB SXM", 80, 2039, 312),
    _nvidia("a100-40", "A100 40 GB SXM", 40, 1555, 312),
    _nvidia("l40s", "L40S", 48, 864, 362),
    _nvidia("l4", "L4", 24, 300, 121),
    _nvidia("a10", "A10", 24, 600, 125),
    _nvidia("rtx4090", "GeForce RTX 4090", 24, 1008, 165.2),
    Device(
        name="mi300x",
        title="AMD Instinct MI300X",
        memory=192 * _GB,
        bandwidth=5.3 * _TB,
        flops=1307.4 * _TFLOPS,
        source="AMD, data sheet of the Instinct MI300X",
    ),
)
"""The known devices, most likely ones first. :func:`device_of` also accepts ``cpu``, which is this machine."""

_CORE_FLOPS = 3e10
_CORE_BANDWIDTH = 5e9


def device_of(name: str) -> Device:
    """Return a device by its name, upper or lower case; ``cpu`` is this machine.

    Raises:
        ConfigError: There is no such device.
    """
    known = {device.name: device for device in DEVICES}
    if name.lower() == "cpu":
        return _cpu()
    if name.lower() not in known:
        names = [*known, "cpu"]
        kinds = [each for each in names if each.startswith(name.lower())]
        hint = _all(kinds) if kinds else did_you_mean(name.lower(), names, otherwise=_all(names))
        raise ConfigError(f"--device {name!r} is not in the table of devices; {hint}")
    return known[name.lower()]


def _all(names: list[str]) -> str:
    return f"there are {', '.join(names)}"


def _cpu() -> Device:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Device(
        name="cpu",
        title=f"this machine, {cores} core{'' if cores == 1 else 's'}",
        memory=_system_memory(),
        bandwidth=cores * _CORE_BANDWIDTH,
        flops=cores * _CORE_FLOPS,
        source="the system's memory; a rough 30 GFLOP/s and 5 GB/s for each core",
    )


def _system_memory() -> float:
    """Return the bytes of this machine's memory, or the limit of the container if that is less."""
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return float(min(physical, int(text)) if text != "max" else physical)


class StepShape(Record, frozen=True, kw_only=True):
    """The number of tasks and rollouts in a step, and limits of the algorithm.

    Attributes:
        tasks: Tasks per step.
        samples: Rollouts per task.
        steps: Total number of steps; 0 if the algorithm sets no limit.
        token_budget: Largest number of tokens that one pass may compute; 0 for no limit.
    """

    tasks: int
    samples: int
    steps: int = 0
    token_budget: int = 0

    @property
    def rollouts(self) -> int:
        """Rollouts per step."""
        return self.tasks * self.samples


class Training(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The settings of an algorithm on which memory and time depend.

    Attributes:
        dtype: The data type in which passes compute.
        lora_rank: Rank of the adapters; 0 if all weights train.
        is_quantized: Whether the frozen weights are stored in 4 bits.
        gradient_checkpointing: Whether layers are computed again in the backward pass; ``auto`` if a pass would
            otherwise keep more than ``KEPT_SHARE`` of the memory that weights, gradients, moments and the server leave.
        moments: The type of AdamW's moments, ``float32`` or ``8bit``.
        token_budget: Largest number of tokens of one pass; 0 for no limit.
        passes: Number of forward and backward passes over a step's rows.
        other_passes: Number of forward passes without gradient over a step's rows, for old and for reference
            log-probabilities.
        updates: Number of updates per step.
        has_reference: Whether a frozen copy of the weights is held.
        has_critic: Whether a critic trains: a second model of the same size, or adapters of its own under LoRA.
        is_sharded: Whether weights are spread over cards and gathered layer by layer, as VERL does it.
    """

    dtype: str = "bfloat16"
    lora_rank: int = 0
    is_quantized: bool = False
    gradient_checkpointing: bool | Literal["auto"] = False
    moments: Literal["float32", "8bit"] = "float32"
    token_budget: int = 0
    passes: int = 1
    other_passes: int = 0
    updates: int = 1
    has_reference: bool = False
    has_critic: bool = False
    is_sharded: bool = False

    @property
    def models(self) -> int:
        """Number of models that train: 2 with a critic, else 1."""
        return 2 if self.has_critic else 1

    def on(self, device: Device, model: "ModelShape") -> "Training":
        """Return the settings with ``auto`` decided, as the trainer of ``agl-algo-torch`` decides it."""
        if self.gradient_checkpointing != "auto":
            return self
        plain = replace(self, gradient_checkpointing=False, has_reference=False)
        held = memory_of(model, plain, tokens=0, trained=0)
        room = device.memory - held.weights - held.gradients - held.optimizer - held.served
        kept = kept_per_token(model, self) * (self.token_budget or _BUDGET)
        return replace(self, gradient_checkpointing=kept > KEPT_SHARE * room)


CHUNK_LOGITS = 2**22
"""The most logits in a chunk, as in the trainer of ``agl-algo-torch``."""

FEWEST_POSITIONS = 128
"""The least number of positions in a chunk, even if the chunk's logits then exceed ``CHUNK_LOGITS``."""

KEPT_SHARE = 0.5
"""The largest share of the memory left by weights, gradients, moments and the server that one pass may keep for its
gradient before ``auto`` turns on gradient checkpointing, as in the trainer of ``agl-algo-torch``."""

_BUDGET = 16_384
_MOMENTS = {"float32": 8.0, "8bit": 2 * (1 + 4 / 256)}
_FLOAT32 = 16
"""Factor by which a GPU is slower in float32 than in bfloat16."""

_COPIES = 4
_QUANTIZED = 0.5 + 4 / 64
"""Bytes of a weight in 4 bits, with its share of the float32 scale of 64 weights."""

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Efficiency(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The shares of a device's published rates that implementations are assumed to reach.

    Attributes:
        training: Share of the arithmetic rate in forward and backward passes.
        prefill: Share of the arithmetic rate in reading prompts, and in the arithmetic of writing answers.
        decoding: Share of the memory's bandwidth in writing answers and in updates.
    """

    training: float = 0.4
    prefill: float = 0.5
    decoding: float = 0.6


class Memory(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The bytes that training and serving need; ``longest`` alone is a number of tokens.

    Attributes:
        weights: The weights in training, and the weights that an adapter leaves frozen.
        gradients: The gradients of the weights in training.
        optimizer: The two moments of AdamW.
        reference: A frozen copy of the weights.
        activations: The tensors that one pass keeps for its gradient, and its temporary tensors.
        served: The weights of the policy's server.
        kv_cache: Keys and values of the conversations that are open at once.
        longest: Number of tokens of the largest pass.
    """

    weights: float
    gradients: float
    optimizer: float
    reference: float
    activations: float
    served: float
    kv_cache: float
    longest: int

    @property
    def training(self) -> float:
        """The bytes that the trainer needs."""
        return self.weights + self.gradients + self.optimizer + self.reference + self.activations

    @property
    def serving(self) -> float:
        """The bytes that the policy's server needs."""
        return self.served + self.kv_cache


class DeviceForecast(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The forecast of an algorithm's step with a model on a device: computed from published rates, not measured.

    Attributes:
        model: The sizes of the model.
        weights: Number of the model's weights.
        device: The device.
        training: The settings on which memory and time depend.
        efficiency: The shares of the device's rates that are assumed to be reached.
        memory: The needed memory, by purpose.
        changes: The cheapest parameters with which training and serving fit on the device, or on several with VERL;
            empty if they fit as they are, or if no known change is enough.
        collect_s: Seconds until all rollouts of a step are done.
        prefill_s: Seconds of a step in which the server reads prompts.
        decode_s: Seconds of a step in which the server writes answers.
        update_s: Seconds of a step's passes and updates.
        token_s: Seconds between two tokens of an answer.
    """

    model: ModelShape
    weights: int
    device: Device
    training: Training
    efficiency: Efficiency
    memory: Memory
    changes: list[str]
    collect_s: float
    prefill_s: float
    decode_s: float
    update_s: float
    token_s: float


def memory_of(
    model: ModelShape, training: Training, *, tokens: int, trained: int, contexts: Sequence[int] = ()
) -> Memory:
    """Return the memory for training and serving a model.

    Args:
        model: The model.
        training: The settings.
        tokens: Number of tokens of the largest pass.
        trained: Number of tokens of that pass that train, and therefore need logits.
        contexts: Number of tokens of each conversation that the server holds at once.
    """
    size = _BYTES.get(training.dtype, 4)
    tuned = model.adapters(training.lora_rank) if training.lora_rank else model.weights
    critic = 0
    if training.has_critic:  # adapters of its own on the same frozen weights, or a copy without the vocabulary's head
        critic = tuned if training.lora_rank else replace(model, is_tied=True).weights
    return Memory(
        weights=4.0 * (tuned + critic) + frozen_bytes(model, training),
        gradients=4.0 * max(tuned, critic),
        optimizer=_MOMENTS[training.moments] * (tuned + critic),
        reference=4.0 * tuned if training.has_reference else 0.0,
        activations=_activations(model, training, tokens=tokens, trained=trained),
        served=float(size * model.weights),
        kv_cache=float(sum(contexts) * 2 * model.layers * model.keys * size),
        longest=tokens,
    )


def frozen_bytes(model: ModelShape, training: Training) -> float:
    """Return the bytes of the weights that adapters leave frozen; embedding and head are never quantised."""
    if not training.lora_rank:
        return 0.0
    size = _BYTES.get(training.dtype, 4)
    tables = model.vocabulary * model.hidden * (1 if model.is_tied else 2)
    return size * tables + (_QUANTIZED if training.is_quantized else size) * (model.weights - tables)


def kept_per_token(model: ModelShape, training: Training) -> float:
    """Return the bytes that the layers keep per token without gradient checkpointing."""
    return float(_layer(model, training) * model.layers)


def _layer(model: ModelShape, training: Training) -> int:
    """Return the bytes that one layer keeps per token."""
    is_half = _BYTES.get(training.dtype, 4) == 2
    h, q, k = model.hidden, model.queries, model.keys
    f = model.feed_forward * max(1, model.experts_used)
    # A norm keeps its input, its scaled input and its output; queries, keys, values and the tensors of the feed-forward
    # network are kept in the type of the pass.
    layer = 26 * h + 6 * q + 4 * k + 8 * f if is_half else 24 * h + 12 * q + 8 * k + 16 * f
    if training.lora_rank:  # each adapter keeps its input in float32, and the output of its first matrix
        layer += 4 * ((5 * h + q + f) * is_half + 7 * training.lora_rank)
    return layer


def _activations(model: ModelShape, training: Training, *, tokens: int, trained: int) -> float:
    h, layer = model.hidden, _layer(model, training)
    backward = 4 * (2 * model.feed_forward * max(1, model.experts_used) + 2 * h) * tokens
    if model.is_tied and not training.lora_rank:
        # The head's gradient of the shared matrix waits for that of the input embeddings, the last of the pass.
        backward += 4 * model.vocabulary * h
    chunk = min(trained, max(FEWEST_POSITIONS, CHUNK_LOGITS // model.vocabulary))
    logits = 4 * (_COPIES * chunk * model.vocabulary + 4 * h * tokens)
    # Autocast holds a copy of every weight that it has converted until the pass ends.
    is_cast = _BYTES.get(training.dtype, 4) == 2 and not (training.lora_rank or training.is_sharded)
    cast = 2 * model.weights if is_cast else 0
    if training.gradient_checkpointing:  # a layer is computed again only after the logits are gone
        return float(4 * h * model.layers * tokens + max(cast, layer * tokens + backward, logits))
    return float(layer * model.layers * tokens + cast + max(backward, logits))


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Recorded rollouts, and the step that is forecast from them.

    Attributes:
        rollouts: The facts of the recorded rollouts.
        shape: The size of the step.
        step: The forecast of the step's tokens.
        concurrency: The most rollouts that run at once.
        gradient_share: Share of the groups that have a gradient.
    """

    rollouts: Sequence[Observed]
    shape: StepShape
    step: StepForecast
    concurrency: int
    gradient_share: float = 1.0


def forecast_on(
    device: Device,
    model: ModelShape,
    training: Training,
    recorded: Recorded,
    *,
    efficiency: Efficiency | None = None,
    settable: Collection[str] = (*SETTABLE, VERL),
) -> DeviceForecast:
    """Forecast the memory and the time of a step of a model on a device.

    The changes that it proposes are of ``settable``, see :func:`cheapest_change`.
    """
    efficiency, given = efficiency or Efficiency(), training
    training = given.on(device, model)
    contexts = sorted(one.context for one in recorded.rollouts)
    open_at_once = min(recorded.concurrency, recorded.shape.rollouts)
    usual = contexts[round(0.9 * (len(contexts) - 1))]
    row_tokens = recorded.step.row_tokens.mean
    share = recorded.step.trained_tokens.mean / row_tokens if row_tokens else 1.0

    def memory(changed: Training) -> Memory:
        changed = changed.on(device, model)  # with other settings, ``auto`` may be decided otherwise
        size = max(contexts[-1], min(changed.token_budget or _BUDGET, round(row_tokens)))
        trained = max(1, round(size * share))
        return memory_of(model, changed, tokens=size, trained=trained, contexts=[usual] * open_at_once)

    pace = _Pace(device, model, training, efficiency)
    mean_context = sum(contexts) / len(contexts)
    token_s = pace.token_s(at_once=open_at_once, context=mean_context)
    played = [_played(one, pace, token_s) for one in recorded.rollouts]
    shape, step = recorded.shape, recorded.step
    collected = forecast(played, tasks=shape.tasks, samples=shape.samples, concurrency=recorded.concurrency)
    return DeviceForecast(
        model=model,
        weights=model.weights,
        device=device,
        training=training,
        efficiency=efficiency,
        memory=memory(training),
        changes=cheapest_change(given, longest=contexts[-1], limit=device.memory, memory=memory, settable=settable),
        collect_s=collected.collect_s.mean,
        prefill_s=pace.prefill_s(step.prompt_tokens.mean, context=mean_context / 2),
        decode_s=token_s * step.response_tokens.mean / max(1, open_at_once),
        update_s=pace.update_s(row_tokens * recorded.gradient_share, context=mean_context / 2),
        token_s=token_s,
    )


def _played(one: Observed, pace: "_Pace", token_s: float) -> Observed:
    """Return a rollout with the times that it would have on the device; times of tools and of the agent stay.

    The times of earlier attempts, whose calls are not known, change by the same factor as those of the deciding one.
    """
    model_s = token_s * one.response_tokens + pace.prefill_s(one.prompt_tokens, context=one.context / 2)
    deciding_s = model_s + max(0.0, one.deciding_s - one.model_s)
    earlier_s = one.seconds - one.deciding_s
    factor = deciding_s / one.deciding_s if one.deciding_s else 1.0
    return replace(one, seconds=deciding_s + earlier_s * factor, deciding_s=deciding_s, model_s=model_s)


class _Pace:
    """Computes the seconds that the operations of a model take on a device."""

    def __init__(self, device: Device, model: ModelShape, training: Training, efficiency: Efficiency) -> None:
        self._device, self._model, self._training, self._efficiency = device, model, training, efficiency
        self._size = _BYTES.get(training.dtype, 4)
        is_slow = self._size == 4 and device.name != "cpu"
        self._rate = device.flops / (_FLOAT32 if is_slow else 1)

    def token_s(self, *, at_once: int, context: float) -> float:
        """Return the seconds to write one token in each of ``at_once`` conversations of ``context`` tokens."""
        model, size = self._model, self._size
        read = size * (self._read(at_once) + at_once * context * 2 * model.layers * model.keys)
        traffic = read / (self._device.bandwidth * self._efficiency.decoding)
        return max(traffic, at_once * self._forward(context) / (self._rate * self._efficiency.prefill))

    def prefill_s(self, tokens: float, *, context: float) -> float:
        """Return the seconds to read prompts of ``tokens`` tokens in all, without a prefix cache."""
        return tokens * self._forward(context) / (self._rate * self._efficiency.prefill)

    def update_s(self, tokens: float, *, context: float) -> float:
        """Return the seconds of all passes over a step's rows, and of the step's updates."""
        training, forward = self._training, self._forward(context)
        backward = forward if training.lora_rank else 2 * forward  # frozen weights have no gradient of their own
        again = forward if training.gradient_checkpointing else 0.0
        passes = training.passes * (forward + backward + again) + training.other_passes * forward
        tuned = self._model.adapters(training.lora_rank) if training.lora_rank else self._model.weights
        # AdamW reads weight, gradient and two moments, and writes all but the gradient: 28 bytes a weight.
        updates = training.updates * 28 * tuned / (self._device.bandwidth * self._efficiency.decoding)
        return training.models * (tokens * passes / (self._rate * self._efficiency.training) + updates)

    def _forward(self, context: float) -> float:
        """Return the arithmetic operations of one token's forward pass after ``context`` earlier tokens."""
        return 2 * self._model.used + 4 * self._model.layers * self._model.queries * context

    def _read(self, at_once: int) -> float:
        """Return the number of weights that are read to write one token in each of ``at_once`` conversations.

        In a model with experts, only experts that at least one of the conversations uses are read.
        """
        model = self._model
        if not model.experts:
            return model.used
        unused = (1 - model.experts_used / model.experts) ** at_once
        dense = replace(model, experts=0, experts_used=0, feed_forward=0)
        return dense.used + (model.weights - replace(model, experts=0, feed_forward=0).weights) * (1 - unused)
