"""Serving a new LoRA version: time until it is live, and time of answers afterwards.

The model is a small random Qwen2 that the `torch` policy serves. An adapter of rank 8 is loaded again and again, as
training publishes its versions. The baseline is a policy with `merge_adapters`, which reads the base again each time.
Run alone: ``python -m benchmarks.bench_adapters``; it needs agl-algo-torch[lora].
"""

import asyncio
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import openai

from agl.contracts import POLICY_KEY_ENV
from agl.schemas import ResourceVersion, Weights
from benchmarks._harness import Figure, component, interleave, table
from benchmarks.bench_verl import make_model

ROWS, TOKENS = 8, 32


def run(*, quick: bool) -> list[Figure]:
    """All rows of the table; none where agl-algo-torch or peft is not installed."""
    if not (find_spec("agl_algo_torch") and find_spec("peft")):
        return []
    with tempfile.TemporaryDirectory() as folder:
        return figures(Path(folder), repeats=3 if quick else 9)


def figures(folder: Path, *, repeats: int) -> list[Figure]:
    """Load and answer in turn, with adapters beside the base and merged into it."""
    base = make_model(folder / "base", hidden=512, layers=16, vocabulary=4096)
    adapter = make_adapter(base, folder / "adapter")
    make = partial(component, "policy", "torch", model=str(base), device="cpu", threads=1)
    policies = {merges: make(name=f"m{merges:d}", merge_adapters=merges) for merges in (False, True)}
    for policy in policies.values():
        asyncio.run(policy.start())
    try:
        loads = interleave({str(m): partial(load, p, base, adapter) for m, p in policies.items()}, repeats=repeats)
        asks = interleave({str(m): partial(answers, p) for m, p in policies.items()}, repeats=repeats)
    finally:
        for policy in policies.values():
            asyncio.run(policy.stop())
    beside, merged = str(False), str(True)
    return [
        Figure(
            name="LoRA version live",
            value=loads[beside].wall_s * 1000,
            unit="ms",
            bar=loads[merged].wall_s * 1000 / 5,
            better="lower",
            baseline=loads[merged].wall_s * 1000,
            baseline_name="base read again, adapter merged into it",
        ),
        Figure(
            name="answers of a LoRA version, per token",
            value=asks[beside].wall_s * 1000,
            unit="ms",
            better="lower",
            baseline=asks[merged].wall_s * 1000,
            baseline_name="merged weights",
        ),
    ]


def make_adapter(base: Path, target: Path) -> Path:
    """Write an adapter of random matrices on every linear layer but the head."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.02)
    adapted.save_pretrained(target)
    return target


def load(policy: Any, base: Path, adapter: Path) -> int:
    """Serve an adapter."""
    weights = Weights(uri=str(adapter), base_model=str(base), format="lora")
    asyncio.run(policy.load(ResourceVersion(name="m", version=adapter.name, resource=weights)))
    return 1


def answers(policy: Any) -> int:
    """Ask for several answers at once; returns their tokens."""
    with (
        openai.OpenAI(base_url=policy.base_url, api_key=os.environ[POLICY_KEY_ENV]) as client,
        ThreadPoolExecutor(ROWS) as threads,
    ):
        asked = [threads.submit(one, client, policy.model_name) for _ in range(ROWS)]
        return sum(each.result() for each in asked)


def one(client: openai.OpenAI, model: str) -> int:
    """Ask for one answer; returns its tokens."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=TOKENS,
        extra_body={"ignore_eos": True},
    )
    return answer.usage.completion_tokens if answer.usage else 0


if __name__ == "__main__":
    print(table(run(quick=False)))
