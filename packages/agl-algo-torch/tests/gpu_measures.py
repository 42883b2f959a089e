"""Measures the trainer for `benchmarks.gpu`, which starts this program: updates, and a base in 4 bits.

It lives here because it looks inside the trainer, as tests do.
"""

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from agl.schemas import Weights
from agl_algo_torch.learner.batch import RowSample, from_tokens, micro_batches
from agl_algo_torch.learner.model import load_model, open_adapter
from agl_algo_torch.learner.packing import packs_rows
from agl_algo_torch.learner.policy_learner import LearnerSettings, PolicyLearner, random_row
from agl_algo_torch.learner.quantized import quantized_layers
from agl_inspect.forecast.costs import Training, memory_of
from agl_inspect.forecast.models import ModelShape
from agl_objectives.settings import Compute, Lora, Optim
from benchmarks._gpu_generation import device_of, seconds
from benchmarks._harness import Figure, table

GIB = 2**30


def learner_of(
    options: argparse.Namespace, model: Path, *, lora: Lora | None = None, lr: float = 1e-6
) -> PolicyLearner:
    compute = Compute(
        device=device_of(options).type,
        dtype="float32" if options.is_small else "bfloat16",
        token_budget=2048 if options.is_small else 16_384,
    )
    return PolicyLearner(
        origin=Weights(uri=str(model)),
        settings=LearnerSettings(optim=Optim(lr=lr), lora=lora or Lora(), compute=compute),
    )


def rows_of(options: argparse.Namespace, model: Path, *, count: int) -> list[RowSample]:
    """Return rows of 100 to 900 random tokens, half of them trained; a tenth of that in the small form."""
    draw, scale = random.Random(0), 10 if options.is_small else 1
    vocabulary = AutoConfig.from_pretrained(model).vocab_size
    lengths = [draw.randint(100, 900) // scale for _ in range(count)]
    return [random_row(number, size, size // 2, vocabulary) for number, size in enumerate(lengths)]


def batches(learner: PolicyLearner, rows: Sequence[RowSample]) -> Iterator[Any]:
    budget, total = learner.settings.compute.token_budget, float(sum(row.trained_tokens for row in rows))
    weight, device = [1.0] * len(rows), learner.loaded.device
    is_packed = packs_rows(learner.loaded.model)
    return micro_batches(rows, weight, token_budget=budget, device=device, total=total, is_packed=is_packed)


def update(learner: PolicyLearner, rows: Sequence[RowSample]) -> float:
    loss = 0.0
    for batch in batches(learner, rows):
        part = -batch.mean(batch.logprobs(learner.loaded.model))
        part.backward()
        loss += float(part.detach())
    learner.apply({})
    return loss


def training(options: argparse.Namespace, model: Path, folder: Path) -> list[Figure]:
    """Time updates of all weights, and compare the most memory with the forecast."""
    device, rows = device_of(options), rows_of(options, model, count=8 if options.is_small else 128)
    learner, tokens = learner_of(options, model), sum(len(row.ids) for row in rows)
    update(learner, rows[:4])
    if not options.is_small:
        torch.cuda.reset_peak_memory_stats()
    taken = min(seconds(lambda: update(learner, rows), device) for _ in range(2))
    largest = max(sum(batch.lengths) for batch in batches(learner, rows))
    expected = memory_of(shape_of(model), training_of(learner), tokens=largest, trained=largest // 2).training
    figures = [
        Figure(name="trained tokens", value=tokens / taken, unit="1/s", better="higher"),
        Figure(name="memory of the trainer, forecast", value=expected / GIB, unit="GiB", better="lower"),
    ]
    if not options.is_small:
        most = torch.cuda.max_memory_allocated() / GIB
        figures.append(Figure(name="memory of the trainer, at most", value=most, unit="GiB", better="lower"))
    return figures


def training_of(learner: PolicyLearner) -> Training:
    settings = learner.settings
    return Training(
        dtype=settings.compute.dtype, lora_rank=settings.lora.rank, gradient_checkpointing=learner.checkpoints
    )


def shape_of(model: Path) -> ModelShape:
    config: Any = AutoConfig.from_pretrained(model)
    return ModelShape(
        name="random",
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head=config.hidden_size // config.num_attention_heads,
        feed_forward=config.intermediate_size,
        vocabulary=config.vocab_size,
        is_tied=True,
    )


def quantized(options: argparse.Namespace, model: Path, folder: Path) -> list[Figure]:
    """Train adapters by the same 50 updates on a base in 4 bits and on one as it is."""
    figures: list[Figure] = []
    rows = [from_tokens(str(n), [(n + 7 * place) % 200 for place in range(256)], [0, *[1] * 255]) for n in range(32)]
    for is_quantized, name in ((False, "as it is"), (True, "in 4 bits")):
        lora = Lora(rank=16, is_quantized=is_quantized)
        learner = learner_of(options, model, lora=lora, lr=1e-3 if options.is_small else 1e-4)
        if not options.is_small:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        losses = [update(learner, rows) for _ in range(5 if options.is_small else 50)]
        taken = time.perf_counter() - started  # reading a loss waits for the device
        figures += [
            Figure(name=f"loss of adapters, base {name}", value=losses[-1], unit="nat", better="lower"),
            Figure(
                name=f"trained tokens, base {name}", value=len(losses) * 32 * 256 / taken, unit="1/s", better="higher"
            ),
            Figure(name=f"linear layers, base {name}", value=frozen_bytes(learner) / GIB, unit="GiB", better="lower"),
        ]
        if not options.is_small:
            most = torch.cuda.max_memory_allocated() / GIB
            figures.append(Figure(name=f"memory at most, base {name}", value=most, unit="GiB", better="lower"))
    weights = learner.export(folder, step=1, keep=1)
    base = load_model(weights.base_model, device=learner.loaded.device.type, dtype=learner.settings.compute.dtype)
    adapted = open_adapter(base.model, weights.uri, settings=lora)
    with torch.no_grad():
        loss = sum(float(-batch.mean(batch.logprobs(adapted))) for batch in batches(learner, rows))
    name = "loss of the adapter in 4 bits, exported and opened on the base as it is"
    return [*figures, Figure(name=name, value=loss, unit="nat", better="lower")]


def frozen_bytes(learner: PolicyLearner) -> int:
    """Return the bytes of the frozen linear layers, with what quantised ones need to compute their weights."""
    layers: list[Any] = list(quantized_layers(learner.loaded.model).values())
    if layers:
        return sum(layer.weight.nbytes + layer.scale.nbytes for layer in layers)
    named = learner.loaded.model.named_parameters()
    return sum(p.nbytes for name, p in named if ".base_layer.weight" in name)


STAGES = {"training": training, "quantized": quantized}

if __name__ == "__main__":
    stage, made, work = sys.argv[1:]
    given = argparse.Namespace(is_small=not torch.cuda.is_available())
    print(table(STAGES[stage](given, Path(made), Path(work))))
