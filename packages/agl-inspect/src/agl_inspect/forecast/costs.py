"""Computes the memory and the time of a step for a model on a device; nothing of it is measured.

Memory. Weights in training, their gradients and the two moments of AdamW are float32, 4 bytes each; under LoRA the base
is frozen in ``dtype``. What a pass keeps for its gradient is counted tensor by tensor, for a decoder layer of
transformers with fused attention: per token 6 h + 3 q + 2 k + 4 f numbers, where h is the width of the layer, q that of
all queries, k that of all keys and f that of the feed-forward network. In float32 these are 4 bytes each; with bfloat16
the norms stay in float32. With gradient checkpointing h numbers a layer are kept, and one layer is computed again at a
time. Korthikanti et al. 2022 (arXiv 2205.05198) count likewise. Logits are computed in chunks, of which four copies are
in memory.

Time. An operation takes as long as its arithmetic or its traffic with memory, whichever is longer (Williams et al.
2009, "Roofline"), at a share of the device's rates that implementations reach; these shares stand in
:class:`Efficiency`. A token costs 2 operations for each weight that it meets in a forward pass and 4 in a backward pass
(Kaplan et al. 2020, arXiv 2001.08361), and attention 4 q for each token before it.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl.schemas import Record
from agl_inspect.forecast.models import ModelShape
from agl_inspect.forecast.observed import Observed
from agl_inspect.forecast.queueing import StepForecast, forecast


class Device(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A device.

    Attributes:
        name: Its name, as ``--device`` takes it.
        title: Its whole name.
        memory: Bytes.
        bandwidth: Bytes per second of its memory.
        flops: Operations per second of dense products in bfloat16.
        source: The document that the figures are from.
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
"""The devices by falling likelihood; ``cpu`` is the machine that plans."""

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
        memory=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        bandwidth=cores * _CORE_BANDWIDTH,
        flops=cores * _CORE_FLOPS,
        source="the system's memory; a rough 30 GFLOP/s and 5 GB/s for each core",
    )


class StepShape(Record, frozen=True, kw_only=True):
    """The size of a step.

    Attributes:
        tasks: Tasks per step.
        samples: Rollouts per task.
        steps: Steps in all; 0 if the algorithm sets no limit.
        token_budget: Tokens that one pass may compute; 0 where there is no such limit.
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
    """The settings of an algorithm that memory and time depend on.

    Attributes:
        dtype: The type that passes compute in.
        lora_rank: Rank of the adapters; 0 if all weights train.
        gradient_checkpointing: Whether layers are computed again in the backward pass.
        token_budget: Tokens of a pass at most; 0 where there is no such limit.
        passes: Forward passes with a gradient over a step's rows.
        other_passes: Forward passes without one: old log-probabilities and those of a reference.
        updates: Updates of a step.
        has_reference: Whether a frozen copy of the weights is held.
        has_critic: Whether a second model of the same size trains.
    """

    dtype: str = "bfloat16"
    lora_rank: int = 0
    gradient_checkpointing: bool = False
    token_budget: int = 0
    passes: int = 1
    other_passes: int = 0
    updates: int = 1
    has_reference: bool = False
    has_critic: bool = False

    @property
    def models(self) -> int:
        """Models that train."""
        return 2 if self.has_critic else 1


CHUNK_LOGITS = 2**22
"""Logits that are in memory at once, as the trainer of ``agl-algo-torch`` cuts them."""

FEWEST_POSITIONS = 128
"""Positions of a chunk at least."""

_FLOAT32 = 16
"""Times that a GPU is slower in float32 than with its units for bfloat16."""

_COPIES = 4
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Efficiency(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The shares of a device's rates that are supposed to be reached.

    Attributes:
        training: Of the arithmetic, in forward and backward passes.
        prefill: Of the arithmetic, where prompts are read.
        decoding: Of the memory's bandwidth, where answers are written; of the arithmetic, as ``prefill``.
    """

    training: float = 0.4
    prefill: float = 0.5
    decoding: float = 0.6


class Memory(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The bytes of training and serving.

    Attributes:
        weights: Weights in training, with those that an adapter leaves frozen.
        gradients: Their gradients.
        optimizer: The two moments of AdamW.
        reference: A frozen copy of the weights.
        activations: Results that one pass keeps for its gradient, and its temporary ones.
        served: The weights of the policy's server.
        kv_cache: Keys and values of the conversations that are open at once.
        longest: Tokens of a pass.
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
        """The bytes of the trainer."""
        return self.weights + self.gradients + self.optimizer + self.reference + self.activations

    @property
    def serving(self) -> float:
        """The bytes of the policy's server."""
        return self.served + self.kv_cache


class DeviceForecast(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A step of an algorithm with a model on a device: computed from published rates, not measured.

    Attributes:
        model: The model; ``weights`` its number.
        device: The device.
        training: The settings that count.
        efficiency: The shares of the device's rates that are supposed to be reached.
        memory: Bytes by part.
        collect_s: Seconds of a step's rollouts; ``prefill_s`` and ``decode_s`` of the server's time in them.
        update_s: Seconds of a step's passes and updates.
        token_s: Seconds from one token of an answer to the next.
    """

    model: ModelShape
    weights: int
    device: Device
    training: Training
    efficiency: Efficiency
    memory: Memory
    collect_s: float
    prefill_s: float
    decode_s: float
    update_s: float
    token_s: float

    @property
    def step_s(self) -> float:
        """Seconds of a step whose rollouts and updates take turns."""
        return self.collect_s + self.update_s


def memory_of(
    model: ModelShape, training: Training, *, tokens: int, trained: int, contexts: Sequence[int] = ()
) -> Memory:
    """Return the memory of training on passes of ``tokens``, of which ``trained`` have logits.

    Args:
        model: The model.
        training: The settings.
        tokens: Tokens of the largest pass.
        trained: Tokens among them that train.
        contexts: Tokens of the conversations that the server holds at once.
    """
    size = _BYTES.get(training.dtype, 4)
    tuned = model.adapters(training.lora_rank) if training.lora_rank else model.weights
    frozen = model.weights if training.lora_rank else 0
    return Memory(
        weights=training.models * (4.0 * tuned + size * frozen),
        gradients=training.models * 4.0 * tuned,
        optimizer=training.models * 8.0 * tuned,
        reference=4.0 * tuned if training.has_reference else 0.0,
        activations=_activations(model, training, tokens=tokens, trained=trained),
        served=float(size * model.weights),
        kv_cache=float(sum(contexts) * 2 * model.layers * model.keys * size),
        longest=tokens,
    )


def _activations(model: ModelShape, training: Training, *, tokens: int, trained: int) -> float:
    is_half = _BYTES.get(training.dtype, 4) == 2
    experts = max(1, model.experts_used)
    h, q, k, f = model.hidden, model.queries, model.keys, model.feed_forward * experts
    # The norms keep what they read, what they scaled and what they gave; queries, keys, values and the feed-forward
    # network are kept in the type of the pass.
    layer = 26 * h + 6 * q + 4 * k + 8 * f if is_half else 24 * h + 12 * q + 8 * k + 16 * f
    if training.lora_rank:  # each adapter keeps its input in float32, and what comes out of its first matrix
        layer += 4 * ((5 * h + q + f) * is_half + 7 * training.lora_rank)
    backward = 4 * (2 * f + 2 * h) * tokens
    chunk = min(trained, max(FEWEST_POSITIONS, CHUNK_LOGITS // model.vocabulary))
    logits = 4 * (_COPIES * chunk * model.vocabulary + 4 * h * tokens)
    if training.gradient_checkpointing:  # no layer is computed again while there are logits
        return float(4 * h * model.layers * tokens + max(layer * tokens + backward, logits))
    return float(layer * model.layers * tokens + max(backward, logits))


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The recorded rollouts, and the step that is made of such.

    Attributes:
        rollouts: Their facts.
        shape: The size of a step.
        step: The forecast of a step's tokens.
        concurrency: Rollouts at once.
        gradient_share: Share of the groups that have a gradient.
    """

    rollouts: Sequence[Observed]
    shape: StepShape
    step: StepForecast
    concurrency: int
    gradient_share: float = 1.0


def forecast_on(
    device: Device, model: ModelShape, training: Training, recorded: Recorded, *, efficiency: Efficiency | None = None
) -> DeviceForecast:
    """Compute memory and time of a step."""
    efficiency = efficiency or Efficiency()
    contexts = sorted(one.context for one in recorded.rollouts)
    open_at_once = min(recorded.concurrency, recorded.shape.rollouts)
    usual = contexts[round(0.9 * (len(contexts) - 1))]
    row_tokens = recorded.step.row_tokens.mean
    longest = max(max(contexts), min(training.token_budget or 16_384, round(row_tokens)))
    share = recorded.step.trained_tokens.mean / row_tokens if row_tokens else 1.0
    memory = memory_of(
        model, training, tokens=longest, trained=max(1, round(longest * share)), contexts=[usual] * open_at_once
    )
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
        memory=memory,
        collect_s=collected.collect_s.mean,
        prefill_s=pace.prefill_s(step.prompt_tokens.mean, context=mean_context / 2),
        decode_s=token_s * step.response_tokens.mean / max(1, open_at_once),
        update_s=pace.update_s(row_tokens * recorded.gradient_share, context=mean_context / 2),
        token_s=token_s,
    )


def _played(one: Observed, pace: "_Pace", token_s: float) -> Observed:
    """Return a rollout with the time that it would take there; tools and the agent itself take what they took."""
    model_s = token_s * one.response_tokens + pace.prefill_s(one.prompt_tokens, context=one.context / 2)
    rest = max(0.0, one.seconds - one.model_s)
    return replace(one, seconds=model_s + rest, model_s=model_s)


class _Pace:
    """The seconds of the operations of a model on a device."""

    def __init__(self, device: Device, model: ModelShape, training: Training, efficiency: Efficiency) -> None:
        self._device, self._model, self._training, self._efficiency = device, model, training, efficiency
        self._size = _BYTES.get(training.dtype, 4)
        is_slow = self._size == 4 and device.name != "cpu"
        self._rate = device.flops / (_FLOAT32 if is_slow else 1)

    def token_s(self, *, at_once: int, context: float) -> float:
        """Seconds of one token in each of so many conversations."""
        model, size = self._model, self._size
        read = size * (self._read(at_once) + at_once * context * 2 * model.layers * model.keys)
        traffic = read / (self._device.bandwidth * self._efficiency.decoding)
        return max(traffic, at_once * self._forward(context) / (self._rate * self._efficiency.prefill))

    def prefill_s(self, tokens: float, *, context: float) -> float:
        """Seconds of reading prompts, without what a cache of their beginnings saves."""
        return tokens * self._forward(context) / (self._rate * self._efficiency.prefill)

    def update_s(self, tokens: float, *, context: float) -> float:
        """Seconds of all passes over a step's rows, and of its updates."""
        training, forward = self._training, self._forward(context)
        backward = forward if training.lora_rank else 2 * forward  # frozen weights have no gradient of their own
        again = forward if training.gradient_checkpointing else 0.0
        passes = training.passes * (forward + backward + again) + training.other_passes * forward
        tuned = self._model.adapters(training.lora_rank) if training.lora_rank else self._model.weights
        # AdamW reads weight, gradient and two moments, and writes all but the gradient: 28 bytes a weight.
        updates = training.updates * 28 * tuned / (self._device.bandwidth * self._efficiency.decoding)
        return training.models * (tokens * passes / (self._rate * self._efficiency.training) + updates)

    def _forward(self, context: float) -> float:
        """Operations of a token's forward pass behind ``context`` tokens."""
        return 2 * self._model.used + 4 * self._model.layers * self._model.queries * context

    def _read(self, at_once: int) -> float:
        """Weights that are read for one token of each conversation: of experts, those that any of them uses."""
        model = self._model
        if not model.experts:
            return model.used
        unused = (1 - model.experts_used / model.experts) ** at_once
        dense = replace(model, experts=0, experts_used=0, feed_forward=0)
        return dense.used + (model.weights - replace(model, experts=0, feed_forward=0).weights) * (1 - unused)
