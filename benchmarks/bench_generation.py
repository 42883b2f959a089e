"""Tokens per CPU second that the server of a ``torch`` policy writes, compared with transformers' ``generate``.

Two loads, in float32 on one thread. In the first, two groups of conversations start with a prompt of 128 tokens each
and take three turns; an answer has 8 to 48 tokens, and 16 observed tokens follow it. A conversation goes on as soon as
it has its answer; `generate` gets a batch of all conversations for each turn, and writes until the longest answer ends.
In the second, prompts have nothing in common, and all answers have 32 tokens: no prefix is reused, and no row waits.
The figures contain the HTTP client, which runs in the same process.
Run alone: ``python -m benchmarks.bench_generation``; it needs agl-algo-torch.
"""

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp

from agl.contracts import POLICY_KEY_ENV
from benchmarks._harness import Figure, component, table
from benchmarks.bench_fit import save_model
from benchmarks.bench_step import MODELS

PROMPT, OBSERVED, BAR = 128, 16, 1.5


@dataclass(frozen=True, kw_only=True)
class Load:
    """Conversations that run at once; `groups` prompts start them, and each of `turns` answers has `answer` tokens."""

    name: str
    groups: int
    members: int
    turns: int
    answer: tuple[int, int]


def loads_of(at_once: int) -> list[Load]:
    return [
        Load(name="turns of groups", groups=2, members=at_once // 2, turns=3, answer=(8, 48)),
        Load(name="equal answers to unlike prompts", groups=at_once, members=1, turns=1, answer=(32, 32)),
    ]


def run(*, quick: bool) -> list[Figure]:
    """All rows of the table; none where agl-algo-torch is not installed."""
    if not find_spec("agl_algo_torch"):
        return []
    if quick:
        return asyncio.run(measure("5", loads_of(4), rounds=1))
    return [
        figure
        for name, at_once, rounds in (("5", 32, 5), ("50", 16, 2))
        for figure in asyncio.run(measure(name, loads_of(at_once), rounds=rounds))
    ]


async def measure(name: str, loads: Sequence[Load], *, rounds: int) -> list[Figure]:
    """Let the server and `generate` write in turns; a first round is not counted."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder), MODELS[name])
        policy, plain = component("policy", "torch", name="lm", model=str(model), device="cpu"), Plain(model)
        await policy.start()
        headers = {"authorization": f"Bearer {os.environ[POLICY_KEY_ENV]}"}
        async with aiohttp.ClientSession(policy.base_url + "/", headers=headers) as client:
            figures = [await compare(client, plain, load, name, rounds=rounds) for load in loads]
        await policy.stop()
    return figures


async def compare(client: aiohttp.ClientSession, plain: "Plain", load: Load, name: str, *, rounds: int) -> Figure:
    rates: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        talks = [
            Talk(load, prompt=f"{number}/{group}", member=member, vocabulary=MODELS[name]["vocab_size"])
            for group in range(load.groups)
            for member in range(load.members)
        ][: None if number else 4]
        tokens, started = sum(sum(talk.answers) for talk in talks), time.process_time()
        await asyncio.gather(*(served(client, talk) for talk in talks))
        middle = time.process_time()
        plain.write(talks, turns=load.turns)
        rates.append((tokens / (middle - started), tokens / (time.process_time() - middle)))
    server, baseline = (statistics.median(found) for found in zip(*rates[1:], strict=True))
    return Figure(
        name=f"generated tokens, {load.name}, {load.groups * load.members} at once, {name} million weights",
        value=server,
        unit="/s",
        bar=BAR * baseline if load.turns > 1 else None,
        baseline=baseline,
        baseline_name="transformers' generate on the same batches",
    )


class Talk:
    """A conversation of random tokens: its prompt, the lengths of its answers, and what follows each answer."""

    def __init__(self, load: Load, *, prompt: str, member: int, vocabulary: int) -> None:
        self.prompt, source = (
            random.Random(prompt).choices(range(vocabulary), k=PROMPT),
            random.Random(f"{prompt}/{member}"),
        )
        self.answers = [source.randint(*load.answer) for _ in range(load.turns)]
        self.observed = [source.choices(range(vocabulary), k=OBSERVED) for _ in range(load.turns)]


async def served(client: aiohttp.ClientSession, talk: Talk) -> None:
    """Let the server write one conversation."""
    ids = talk.prompt
    for length, observed in zip(talk.answers, talk.observed, strict=True):
        body = {"model": "lm", "prompt": ids, "max_tokens": length, "ignore_eos": True, "return_token_ids": True}
        async with client.post("completions", json=body | {"logprobs": 0}, raise_for_status=True) as response:
            answer = (await response.json())["choices"][0]["token_ids"]
        assert len(answer) == length
        ids = [*ids, *answer, *observed]


class Plain:
    """The same conversations by `generate`, padded on the left."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(path).eval()

    def write(self, talks: Sequence[Talk], *, turns: int) -> None:
        """Let the model write the conversations, turn by turn."""
        ids = [talk.prompt for talk in talks]
        for turn in range(turns):
            answers = self.answers(ids, max(talk.answers[turn] for talk in talks))
            ids = [
                [*row, *answer[: talk.answers[turn]], *talk.observed[turn]]
                for row, answer, talk in zip(ids, answers, talks, strict=True)
            ]

    def answers(self, ids: Sequence[list[int]], length: int) -> list[list[int]]:
        """Return an answer of `length` tokens to each prompt."""
        import torch

        longest = max(map(len, ids))
        rows = torch.tensor([[0] * (longest - len(row)) + row for row in ids])
        attention = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
        lengths = {"min_new_tokens": length, "max_new_tokens": length}
        with torch.inference_mode():
            found = self.model.generate(rows, attention_mask=attention, do_sample=True, top_k=0, **lengths)
        return found[:, longest:].tolist()


if __name__ == "__main__":
    print(table(run(quick=False)))
