"""Peak memory of an update on 4,096 tokens of which a tenth trains, with a vocabulary of 32,768.

The model is a small random Qwen2, so that logits are most of what a pass holds. `grpo` does its update on eight rows.
The baseline is the same pass in bare torch: logits of all tokens, those of the trained ones chosen, log-probabilities
and entropies of them, a gradient. Each runs in a process of its own after one on short rows, and the figure is how far
its peak of resident memory rises.
Run alone: ``python -m benchmarks.bench_memory``; it needs agl-algo-torch.
"""

import asyncio
import os
import random
import resource
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agl.schemas import Episode, Row, Segment, Transition, Weights, pack_floats, pack_ids
from agl_testing.conformance import AlgorithmBench, AlgorithmScenario, RolloutOrder
from benchmarks._harness import Figure, component, table
from benchmarks.bench_verl import make_model

TASKS, ROLLOUTS, LENGTH, SHORT = 2, 4, 512, 20
VOCABULARY = 32_768


def run(*, quick: bool) -> list[Figure]:
    """All rows of the table; none where agl-algo-torch is not installed."""
    del quick
    if not find_spec("agl_algo_torch"):
        return []
    whole, update = (peak_mib(way) for way in ("whole", "grpo"))
    return [
        Figure(
            name="peak memory of an update on 4,096 tokens, a tenth trained, vocabulary 32,768",
            value=update,
            unit="MiB",
            bar=whole / 5,
            better="lower",
            baseline=whole,
            baseline_name="one pass in bare torch with the logits of all tokens",
        )
    ]


def peak_mib(way: str) -> float:
    """The peak memory of one way, in MiB."""
    command = [sys.executable, "-m", "benchmarks.bench_memory", way]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}  # what is freed goes back to the system at once
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def measure(way: str) -> float:
    """Do one way's pass in this process, after one on short rows, and return what it added to the peak."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", vocabulary=VOCABULARY, hidden=64)
        return asyncio.run(measure_grpo(Path(folder), model)) if way == "grpo" else measure_whole(model)


def peak_so_far() -> float:
    """The largest resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # KiB on Linux


async def measure_grpo(folder: Path, model: Path) -> float:
    """Two steps of GRPO, the first on short rows."""
    player = Player()
    scenario = AlgorithmScenario(
        make=make_grpo, play=player.play, tunes=("llm",), resources={"llm": Weights(uri=str(model))}
    )
    async with AlgorithmBench(scenario, folder / "grpo") as bench:
        algorithm = bench.scenario.make()
        await algorithm.setup(bench.context())
        await algorithm.step()
        player.length, before = LENGTH, peak_so_far()
        await algorithm.step()
    return peak_so_far() - before


def make_grpo() -> Any:
    """GRPO on one thread of the CPU, with a budget that all rows fit in."""
    sizes = {
        "tasks_per_step": TASKS,
        "group_size": ROLLOUTS,
    }
    compute = {"threads": 1, "device": "cpu", "token_budget": TASKS * ROLLOUTS * LENGTH}
    return component("algorithm", "grpo", steps=2, compute=compute, **sizes)


class Player:
    """Plays rollouts of random tokens, of which the last tenth was sampled."""

    length, vocabulary = SHORT, VOCABULARY

    def play(self, order: RolloutOrder) -> Episode:
        """One call on one row."""
        rollout, source = order.rollout, random.Random(order.rollout.rollout_id)
        part = Segment(start=self.length - self.length // 10, stop=self.length, span_id=f"{rollout.rollout_id}/call")
        is_sampled = [place >= part.start for place in range(self.length)]
        names = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt_id}
        row = Row(
            **names,
            group_id=rollout.group_id,
            branch=0,
            ids=pack_ids(source.randrange(self.vocabulary) for _ in is_sampled),
            mask=bytes(map(int, is_sampled)),
            logprobs=pack_floats(-10.0 * sampled for sampled in is_sampled),
            segments=(part,),
        )
        call = Transition(**names, span_id=part.span_id)
        return Episode(rollout=rollout, attempt=None, reward=source.random(), transitions=(call,), rows=(row,))


def measure_whole(path: Path) -> float:
    """Passes with the logits of all tokens, the first on short rows."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path)
    whole_pass(model, length=SHORT)
    before = peak_so_far()
    whole_pass(model, length=LENGTH)
    return peak_so_far() - before


def whole_pass(model: Any, *, length: int) -> None:
    """Log-probabilities of the last tenth of each row, the entropies before them, and a gradient."""
    import torch

    ids = torch.randint(VOCABULARY, (TASKS * ROLLOUTS, length))
    trained = torch.arange(1, length) >= length - length // 10
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[:, :-1][:, trained]
    logp = logits.log_softmax(-1)
    with torch.no_grad():
        -(logp.exp() * logp).sum(-1)
    (-logp.gather(-1, ids[:, 1:][:, trained][..., None])).mean().backward()


if __name__ == "__main__":
    if sys.argv[1:]:
        print(measure(sys.argv[1]))
    else:
        print(table(run(quick=False)))
