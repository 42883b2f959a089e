"""The part of ``benchmarks.gpu`` for machines with vLLM: a run that vLLM serves and agl-algo-torch trains.

An agent asks the model for texts, GRPO trains on them, and every step's weights go back into vLLM by the chosen route.
Printed are sampled tokens per second, the share of a step in which the trainer computes, the seconds of a weight update
with its check, the largest difference between the log-probability that vLLM sampled with and the trainer's, and the
memory that the trainer took of the GPU at most. Layers are computed again in the backward pass, as in the examples'
`large.toml`.
"""

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

import agl
from agl import PluginManager
from agl.contracts import Policy, ServedModel
from agl.schemas import ResourceVersion
from agl.stores import MemoryStore
from agl_run import policy
from benchmarks._harness import Figure

ROUTES = ("restart", "reload", "sleep", "lora")
RANK = 8


def routes(options: argparse.Namespace, model: Path, folder: Path) -> list[Figure]:
    """Return the figures of every chosen route; the CPU has no sleep."""
    chosen = options.routes or [route for route in ROUTES if not (options.is_small and route == "sleep")]
    return [figure for route in chosen for figure in measure(options, model, route, folder / route)]


class Watch:
    """Takes the times of a run: a plugin with a policy that is vLLM's with a clock."""

    def __init__(self) -> None:
        self.loads: list[float] = []
        self.ends: list[float] = []
        self.tokens: list[int] = []
        self.sampled = 0

    @agl.hookimpl
    def agl_policies(self) -> Any:
        yield agl.PolicyEntry(name="vllm-timed", factory=self.timed, trains=True)

    @agl.hookimpl
    def agl_step_finished(self) -> None:
        self.ends.append(time.perf_counter())
        self.tokens.append(self.sampled)
        self.sampled = 0

    def timed(self, **settings: Any) -> Policy:
        """vLLM's policy with a clock around every update."""
        manager = PluginManager.from_environment()
        policy: Policy = manager.build(manager.policy("vllm"), **settings)
        load = policy.load

        async def load_and_note(version: ResourceVersion) -> ServedModel:
            started = time.perf_counter()
            served = await load(version)
            self.loads.append(time.perf_counter() - started)
            return served

        policy.load = load_and_note
        return policy

    def agent(self, *, tokens: int) -> Any:
        """An agent that asks once for an answer of exactly so many tokens."""
        import openai

        async def write(task: Any, llm: agl.LLM) -> float:
            async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key or "none", timeout=600) as client:
                answer = await client.chat.completions.create(
                    model=llm.model,
                    messages=[{"role": "user", "content": f"Write something about the number {task['n']}."}],
                    max_tokens=tokens,
                    extra_body={"ignore_eos": True},
                )
            self.sampled += tokens
            text = answer.choices[0].message.content or ""
            return len(set(text)) / 100

        return agl.agent(write)


def measure(options: argparse.Namespace, model: Path, route: str, workdir: Path) -> list[Figure]:
    """A run of the route's own; the figures of its steps after the first."""
    watch, store = Watch(), MemoryStore()
    plugins = PluginManager.from_environment()
    plugins.register(watch, name="watch")
    is_lora = route == "lora"
    trainer = agl.Trainer(
        name=f"gpu-{route}",
        algorithm=agl.GRPO(
            tunes="llm",
            steps=options.steps,
            tasks_per_step=options.tasks,
            group_size=options.group,
            lora={"rank": RANK if is_lora else 0},
            compute={
                "device": "cpu" if options.is_small else "cuda",
                "dtype": "float32" if options.is_small else "bfloat16",
                "gradient_checkpointing": True,
            },
        ),
        policies={"llm": policy("vllm-timed", **policy_settings(options, model, route))},
        store=store,
        plugins=plugins,
        n_runners=options.tasks * options.group,
        workdir=str(workdir),
    )
    trainer.fit(watch.agent(tokens=options.tokens), [{"n": number} for number in range(options.tasks)])
    return figures(route, watch, by_name(store, f"gpu-{route}"), is_cpu=options.is_small)


def policy_settings(options: argparse.Namespace, model: Path, route: str) -> dict[str, Any]:
    args = ["--max-model-len", str(options.tokens + 256)]
    settings: dict[str, Any] = {"model": str(model), "python": options.python}
    if options.is_small:
        settings["env"] = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        settings |= {"dtype": "float32", "args": [*args, "--enforce-eager"]}
    else:
        settings |= {"dtype": "bfloat16", "args": [*args, "--gpu-memory-utilization", "0.4"]}
    return settings | ({"lora_rank": RANK} if route == "lora" else {"sync": route})


def by_name(store: MemoryStore, experiment: str) -> dict[str, list[float]]:
    """The algorithm's numbers by step, the first step left out."""
    found: dict[str, list[float]] = {}
    for metric in sorted(asyncio.run(store.metrics(experiment)), key=lambda metric: metric.step):
        if metric.step > 1:
            found.setdefault(metric.name, []).append(metric.value)
    return found


def figures(route: str, watch: Watch, numbers: dict[str, list[float]], *, is_cpu: bool) -> list[Figure]:
    wall_s = watch.ends[-1] - watch.ends[0]
    where = f"{route}, CPU: a trial, no measurement" if is_cpu else route
    rows = [
        ("sampled tokens per second while rollouts are collected", sum(watch.tokens[1:]) / sum(numbers["collect_s"])),
        ("share of a step in which the trainer computes", sum(numbers["update_s"]) / wall_s),
        ("seconds of a weight update with its check", sum(watch.loads[1:]) / len(watch.loads[1:])),
        ("largest difference of log-probabilities, vLLM's and the trainer's", max(numbers["logprob_gap"])),
    ]
    if not is_cpu:
        rows.append(("most memory of the GPU that the trainer took", taken_gib()))
    units, better = ("1/s", "", "s", "nat", "GiB"), ("higher", "higher", "lower", "lower", "lower")
    return [
        Figure(name=f"{name} ({where})", value=value, unit=unit, better=side)  # type: ignore[arg-type]
        for (name, value), unit, side in zip(rows, units, better, strict=False)
    ]


def taken_gib() -> float:
    """Return the most memory that this process took of the GPU since the last call, vLLM's own left out."""
    import torch

    most = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return most
