"""The memory that ``agl check --forecast`` computes for training, against the peak of real steps on this machine.

Each case trains a random Qwen2 of 38 million weights for two steps of eight rows, in passes of 512 tokens, in a
process of its own. The same steps run on a tiny model first; the figure is how far the peak of resident memory then
rises above the memory at that moment. The bar is 10 % of the forecast on either side.
Run alone: ``python -m benchmarks.bench_fit``; it needs agl-algo-torch and Linux, and takes five minutes.
"""

import asyncio
import gc
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from agl.schemas import Weights
from agl_inspect.forecast.costs import Training, memory_of
from agl_inspect.forecast.models import shape_from
from agl_testing.conformance import AlgorithmBench, AlgorithmScenario
from benchmarks._harness import Figure, component, table
from benchmarks.bench_memory import Player
from benchmarks.bench_verl import save_tokenizer

TASKS, ROLLOUTS, LENGTH, BUDGET = 2, 4, 128, 512
BIG: dict[str, Any] = {
    "vocab_size": 16_384,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
TINY = BIG | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}

CASES: dict[str, tuple[str, dict[str, Any], Training]] = {
    "all weights": ("grpo", {}, Training()),
    "adapters of rank 16": ("grpo", {"lora": {"rank": 16}}, Training(lora_rank=16)),
    "gradient checkpointing": (
        "grpo",
        {"compute": {"gradient_checkpointing": True}},
        Training(gradient_checkpointing=True),
    ),
    "moments in 8 bits": ("grpo", {"optim": {"moments": "8bit"}}, Training(moments="8bit")),
    "ppo with its critic": ("ppo", {}, Training(has_critic=True)),
    "ppo with adapters": ("ppo", {"lora": {"rank": 16}}, Training(lora_rank=16, has_critic=True)),
    "dpo with its reference": ("dpo", {"pairs": "all"}, Training(has_reference=True)),
}


def run(*, quick: bool) -> list[Figure]:
    """All rows of the table; none where agl-algo-torch is not installed."""
    if not find_spec("agl_algo_torch"):
        return []
    figures: list[Figure] = []
    for name in list(CASES)[: 2 if quick else None]:
        real, computed = peak_bytes(name), forecast(name)
        print(f"    {name}: {real / 1e6:.0f} MB, forecast {computed / 1e6:.0f} MB", flush=True)
        figures.append(
            Figure(
                name=f"error of the forecast's memory, {name}",
                value=abs(computed / real - 1),
                unit="share",
                bar=0.1,
                better="lower",
            )
        )
    return figures


def forecast(name: str) -> float:
    """Return the bytes that the forecast has for a case."""
    training = replace(CASES[name][2], dtype="float32")
    return memory_of(shape_from(BIG, name="big"), training, tokens=BUDGET, trained=BUDGET // 10).training


def peak_bytes(name: str) -> float:
    """Run a case in a process of its own, and return the bytes by which its peak rises."""
    command = [sys.executable, "-m", "benchmarks.bench_fit", name]
    # What is freed goes back to the system at once, and threads share one heap.
    allocator = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | allocator).stdout)


def measure(name: str) -> float:
    """Run a case in this process, first on a tiny model."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        models = {size: save_model(Path(folder) / size, sizes) for size, sizes in (("tiny", TINY), ("big", BIG))}
        gc.collect()
        asyncio.run(train(name, Path(folder) / "first", models["tiny"]))
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = memory_now("VmRSS")
        asyncio.run(train(name, Path(folder) / "second", models["big"]))
        return memory_now("VmHWM") - before


def memory_now(name: str) -> float:
    """Return a size from the system's account of this process, in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return float(found[1]) * 1024


async def train(name: str, folder: Path, model: Path) -> None:
    """Do two steps."""
    player = Player()
    player.length, player.vocabulary = LENGTH, BIG["vocab_size"]
    scenario = AlgorithmScenario(
        make=lambda: make(name), play=player.play, tunes=("llm",), resources={"llm": Weights(uri=str(model))}
    )
    async with AlgorithmBench(scenario, folder) as bench:
        algorithm = bench.scenario.make()
        await algorithm.setup(bench.context())
        for _ in range(2):
            await algorithm.step()
        await algorithm.close()


def make(name: str) -> Any:
    """Return the algorithm of a case."""
    algorithm, params, _ = CASES[name]
    compute = {"threads": 1, "device": "cpu", "token_budget": BUDGET, **params.get("compute", {})}
    sizes = {"steps": 2, "tasks_per_step": TASKS, "group_size": ROLLOUTS}
    return component("algorithm", algorithm, **sizes, **params | {"compute": compute})


def save_model(target: Path, sizes: dict[str, Any]) -> Path:
    """Save a random Qwen2."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**sizes)).save_pretrained(target)
    save_tokenizer(target)
    return target


if __name__ == "__main__":
    if sys.argv[1:]:
        print(measure(sys.argv[1]))
    else:
        print(table(run(quick=False)))
