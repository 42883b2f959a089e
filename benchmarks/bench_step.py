"""A training step of ``grpo`` on the CPU, compared with a hand-written loop on the same rows: CPU time and peak memory.

The rows of a group share a long prompt, and go on with two to six turns of written and of observed tokens. Both do one
update of all weights in float32 on one thread, in passes of `BUDGET` tokens, and only the states before trained tokens
go through the head. The loop pads rows of similar length and does nothing else: no metrics, no importance weights, no
entropies. The step is the algorithm's whole step without its rollouts and without files.
Run alone: ``python -m benchmarks.bench_step``; it needs agl-algo-torch and Linux.
"""

import asyncio
import gc
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from agl.schemas import Episode, Row, Segment, Transition, Weights, pack_floats, pack_ids, unpack_ids
from agl_testing.conformance import AlgorithmBench, AlgorithmScenario, RolloutOrder
from benchmarks._harness import Figure, component, table
from benchmarks.bench_fit import memory_now, save_model

GROUPS, PROMPT, TURNS, WRITTEN, OBSERVED = 2, 128, (2, 6), 16, 16
BUDGET, LR = 1024, 1e-5
BAR = 1.2


def sizes_of(vocabulary: int, hidden: int, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }


MODELS = {"5": sizes_of(4_096, 256, 5), "50": sizes_of(32_768, 512, 10)}
"""Sizes of models by their millions of weights."""

MEMBERS = {"5": 8, "50": 4}
"""Rollouts of a group."""

Rows = Sequence[tuple[Row, float]]
"""Rows and their rewards."""


def run(*, quick: bool) -> list[Figure]:
    """All rows of the table; none where agl-algo-torch is not installed."""
    if not find_spec("agl_algo_torch"):
        return []
    return [
        figure for name in list(MODELS)[: 1 if quick else None] for figure in figures(name, steps=2 if quick else 5)
    ]


def figures(name: str, *, steps: int) -> list[Figure]:
    """CPU seconds of a step in turns with the loop, and the peaks of both, each in a process of its own."""
    step, loop = (statistics.median(found) for found in zip(*child("times", name, steps), strict=True))
    peaks = {way: child("peak", name, way) for way in ("step", "loop")}
    return [
        Figure(
            name=f"{what} of a training step, {name} million weights",
            value=value,
            unit=unit,
            bar=BAR * baseline,
            better="lower",
            baseline=baseline,
            baseline_name="a hand-written loop on the same rows",
        )
        for what, unit, value, baseline in [("CPU", "s", step, loop), ("memory", "MB", peaks["step"], peaks["loop"])]
    ]


def child(*words: object) -> Any:
    """Return what a measurement in a process of its own has found."""
    command = [sys.executable, "-m", "benchmarks.bench_step", *map(str, words)]
    # What is freed goes back to the system at once, and threads share one heap.
    at_once = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"} if words[0] == "peak" else {}
    environment = os.environ | {"MALLOC_ARENA_MAX": "1"} | at_once
    return msgspec.json.decode(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout)


async def measure(what: str, name: str, word: str) -> Any:
    """Make the model, and measure the CPU seconds of `word` steps, or the peak of the way `word`."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder) / "model", MODELS[name])
        player = Player(MODELS[name]["vocab_size"])
        steps = int(word) + 1 if what == "times" else 2
        scenario = AlgorithmScenario(
            make=lambda: make(MEMBERS[name], steps),
            play=player.play,
            tunes=("llm",),
            resources={"llm": Weights(uri=str(model))},
        )
        async with AlgorithmBench(scenario, Path(folder) / "work") as bench:
            algorithm: Any = scenario.make()
            # A policy that takes the weights from memory, and steps that may wait to be saved: no file is written.
            policy = SimpleNamespace(offer_weights=lambda resource, model: None)
            await algorithm.setup(replace(bench.context(), defer=lambda save: None, policy=lambda name: policy))
            if what == "times":
                return (await times(algorithm, Loop(model), player, steps))[1:]
            return await peak(algorithm, model, player, MEMBERS[name], is_loop=word == "loop")


async def times(algorithm: Any, loop: "Loop", player: "Player", steps: int) -> list[tuple[float, float]]:
    """Return the CPU seconds of each step of the algorithm and of the loop, which take turns."""
    found: list[tuple[float, float]] = []
    for _ in range(steps):
        player.rows, player.seconds = [], 0.0
        started = time.process_time()
        report = await algorithm.step()
        middle = time.process_time()
        norm = loop.step(player.rows)
        found.append((middle - started - player.seconds, time.process_time() - middle))
        assert math.isclose(norm, report.metrics["grad_norm"], rel_tol=1e-4), (norm, report.metrics)
    return found


async def peak(algorithm: Any, model: Path, player: "Player", members: int, *, is_loop: bool) -> float:
    """Return how far two steps of one way, the model included, raise the memory of this process, in MB."""
    rows = [(player.row(f"{group}/{n}", str(group)), float(n % 2)) for group in range(GROUPS) for n in range(members)]
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = memory_now("VmRSS")
    loop = Loop(model) if is_loop else None
    for _ in range(2):
        if loop:
            loop.step(rows)
        else:
            await algorithm.step()
    return (memory_now("VmHWM") - before) / 1e6


def make(members: int, steps: int) -> Any:
    """Return the algorithm; its importance weights are computed, and are all 1."""
    compute = {"threads": 1, "device": "cpu", "token_budget": BUDGET}
    return component(
        "algorithm",
        "grpo",
        steps=steps,
        tasks_per_step=GROUPS,
        group_size=members,
        compute=compute,
        optim={"lr": LR, "warmup": 0},
        correction={"cap": 1.0},
    )


class Player:
    """Plays rollouts of random tokens; holds the rows of a step, and the CPU seconds of making them."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = range(vocabulary)
        self.rows: list[tuple[Row, float]] = []
        self.seconds = 0.0

    def play(self, order: RolloutOrder) -> Episode:
        started, rollout = time.process_time(), order.rollout
        row, reward = self.row(rollout.rollout_id, rollout.group_id), random.Random(rollout.rollout_id).random()
        names = {"rollout_id": rollout.rollout_id, "attempt_id": row.attempt_id}
        calls = tuple(Transition(**names, span_id=part.span_id) for part in row.segments)
        self.rows.append((row, reward))
        self.seconds += time.process_time() - started
        return Episode(rollout=rollout, attempt=None, reward=reward, transitions=calls, rows=(row,))

    def row(self, rollout: str, group: str) -> Row:
        """Return a row whose recorded log-probabilities are so low that every importance weight is at its cap."""
        ids, source, parts = random.Random(group).choices(self._vocabulary, k=PROMPT), random.Random(rollout), []
        for turn in range(source.randint(*TURNS)):
            parts.append(Segment(start=len(ids), stop=len(ids) + WRITTEN, span_id=f"{rollout}/{turn}"))
            ids += source.choices(self._vocabulary, k=WRITTEN + OBSERVED)
        mask = [any(part.start <= at < part.stop for part in parts) for at in range(len(ids))]
        return Row(
            rollout_id=rollout,
            attempt_id=f"{rollout}.1",
            group_id=group,
            branch=0,
            ids=pack_ids(ids),
            mask=bytes(mask),
            logprobs=pack_floats(-30.0 * written for written in mask),
            segments=tuple(parts),
        )


class Loop:
    """A step of the policy gradient as one writes it by hand."""

    def __init__(self, path: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(path)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.0, fused=True)

    def step(self, rows: Rows) -> float:
        """Do one update; returns the norm of its gradient."""
        import torch

        tokens = sum(sum(row.mask) for row, _ in rows)
        scored = sorted(advantages(rows), key=lambda one: len(one[0].mask))
        while scored:
            size = max(1, BUDGET // len(scored[-1][0].mask))  # the longest rows first
            self.backward(scored[-size:], tokens)
            del scored[-size:]
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def backward(self, rows: Rows, tokens: int) -> None:
        """Add the gradient of some rows."""
        import torch
        from torch.nn.functional import cross_entropy
        from torch.nn.utils.rnn import pad_sequence

        ids = pad_sequence([torch.tensor(unpack_ids(row.ids)) for row, _ in rows], batch_first=True)
        mask = pad_sequence([torch.tensor(list(row.mask)) for row, _ in rows], batch_first=True)[:, 1:] > 0
        attention = pad_sequence([torch.ones(len(row.mask)) for row, _ in rows], batch_first=True)
        hidden = self.model.model(input_ids=ids, attention_mask=attention, use_cache=False).last_hidden_state
        logits = self.model.lm_head(hidden[:, :-1][mask])
        nll = cross_entropy(logits, ids[:, 1:][mask], reduction="none")
        advantage = torch.tensor([value for _, value in rows])[:, None].expand(mask.shape)[mask]
        ((advantage * nll).sum() / tokens).backward()


def advantages(rows: Rows) -> Rows:
    """Return the rows with (R - mean) / (std + 1e-6) of their group in place of the reward R."""
    groups = {group: [r for row, r in rows if row.group_id == group] for group in {row.group_id for row, _ in rows}}
    scales = {group: (statistics.fmean(found), statistics.stdev(found) + 1e-6) for group, found in groups.items()}
    return [(row, (r - scales[row.group_id][0]) / scales[row.group_id][1]) for row, r in rows]


if __name__ == "__main__":
    if sys.argv[1:]:
        print(msgspec.json.encode(asyncio.run(measure(*sys.argv[1:]))).decode())
    else:
        print(table(run(quick=False)))
