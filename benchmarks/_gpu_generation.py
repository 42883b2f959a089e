"""The part of ``benchmarks.gpu`` that writes answers, with the policy's server and with transformers."""

import argparse
import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agl.contracts import POLICY_KEY_ENV
from benchmarks._harness import Figure, component


def device_of(options: argparse.Namespace) -> torch.device:
    return torch.device("cpu" if options.is_small else "cuda")


def seconds(action: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of an action, with everything that it queued on the device."""
    started = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def generation(options: argparse.Namespace, model: Path, folder: Path) -> list[Figure]:
    """Let the policy's server and transformers write equally long answers to the same prompts."""
    device, length = device_of(options), 8 if options.is_small else 128
    counts = (1, 4) if options.is_small else (1, 32, 128)
    dtype = torch.float32 if options.is_small else torch.bfloat16
    plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    held = {"model": str(model), "device": device.type, "dtype": str(dtype).removeprefix("torch.")}
    policy = component("policy", "torch", name="lm", max_rows=max(counts), **held)
    served = asyncio.run(serve(policy, counts, length))
    figures: list[Figure] = []
    for count, rate in zip(counts, served, strict=True):
        ids = torch.stack([torch.tensor(prompt_ids(tokenizer, n)) for n in range(count)]).to(device)
        generate_plain(plain, ids, 4)
        base = count * length / seconds(lambda: generate_plain(plain, ids, length), device)  # noqa: B023 - called at once
        figures.append(
            Figure(
                name=f"generated tokens, {count} at once",
                value=rate,
                unit="1/s",
                better="higher",
                baseline=base,
                baseline_name="transformers' generate",
            )
        )
    return figures


def question(number: int) -> str:
    return f"{number:06d}: write something about this number, and do not stop before you are asked to."


def prompt_ids(tokenizer: Any, number: int) -> list[int]:
    messages = [{"role": "user", "content": question(number)}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def generate_plain(model: Any, ids: torch.Tensor, length: int) -> None:
    lengths = {"max_new_tokens": length, "min_new_tokens": length}
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, **lengths)


async def serve(policy: Any, counts: Sequence[int], length: int) -> list[float]:
    """Return the tokens per second of each number of requests at once."""
    await policy.start()
    rates: list[float] = []
    async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=os.environ[POLICY_KEY_ENV], timeout=600) as client:

        async def ask(number: int, tokens: int) -> None:
            await client.chat.completions.create(
                model="lm",
                messages=[{"role": "user", "content": question(number)}],
                max_tokens=tokens,
                extra_body={"ignore_eos": True, "return_token_ids": True},
                logprobs=True,
            )

        for count in counts:
            await asyncio.gather(*(ask(10_000 + number, 4) for number in range(count)))
            started = time.perf_counter()
            await asyncio.gather(*(ask(number, length) for number in range(count)))
            rates.append(count * length / (time.perf_counter() - started))
    await policy.stop()
    return rates
