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

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from agl.schemas import Record
from agl_inspect.forecast.devices import Device
from agl_inspect.forecast.models import ModelShape
from agl_inspect.forecast.observed import Observed
from agl_inspect.forecast.queueing import StepForecast, forecast
from agl_inspect.forecast.step_size import StepShape, Training

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
