"""``python -m benchmarks.gpu``: what a GPU makes of a run that vLLM serves and agl-algo-torch trains.

It makes its own model of random weights, so it needs no network: a Qwen2 of the chosen size with a byte-level
tokenizer. An agent asks it for texts, GRPO trains on them, and every step's weights go back into vLLM by the chosen
route. Printed are sampled tokens per second, the share of a step in which the trainer computes, the seconds of a weight
update with its check, the largest difference between the log-probability that vLLM sampled with and the trainer's, and
the memory that the trainer took of the GPU at most. Layers are computed again in the backward pass, as in the examples'
`large.toml`.

It needs agl-gateway, agl-vllm, agl-algo-torch[lora] and openai here, and vLLM for the interpreter of ``--python``.
Not part of ``python -m benchmarks``, which runs on every machine.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import agl
from agl import PluginManager
from agl.contracts import Policy, ServedModel
from agl.schemas import ResourceVersion
from agl.stores import MemoryStore
from agl_run import policy
from benchmarks._harness import Figure, table

SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
ROUTES = ("restart", "reload", "sleep", "lora")
VOCABULARY = 151_936
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RANK = 8


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    problem = why_not(options)
    if problem:
        print(problem, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", size=options.size, has_gpu=not options.cpu)
        figures: list[Figure] = []
        for route in options.routes or [route for route in ROUTES if not (options.cpu and route == "sleep")]:
            figures += measure(options, model, route, Path(folder) / route)
            print(table(figures), flush=True)
    return 0


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has vLLM; this one by default")
    parser.add_argument("--size", choices=SIZES, default="0.5b")
    parser.add_argument("--routes", choices=ROUTES, nargs="+", help="all by default, on a CPU without sleep")
    parser.add_argument("--steps", type=int, default=4, help="the first is warm-up and not counted")
    parser.add_argument("--tasks", type=int, default=32, help="groups per step")
    parser.add_argument("--group", type=int, default=8, help="rollouts per group")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of an answer")
    parser.add_argument("--cpu", action="store_true", help="try this program with vLLM's CPU build; measures no GPU")
    return parser.parse_args(arguments)


def why_not(options: argparse.Namespace) -> str:
    """Return what this machine or the options lack, ``""`` if nothing."""
    if options.steps < 2:
        return f"--steps is {options.steps}, and the first is not counted; give at least 2"
    try:
        import torch
    except ImportError:
        return "benchmarks.gpu needs torch, which is not installed here; install agl-algo-torch[lora]"
    if not options.cpu and not torch.cuda.is_available():
        return (
            "benchmarks.gpu measures a GPU, and torch finds none on this machine "
            f"(torch {torch.__version__}); run it where torch.cuda.is_available() is true. Nothing was measured."
        )
    return ""


def make_model(folder: Path, *, size: str, has_gpu: bool) -> Path:
    """A random Qwen2 that speaks bytes; its vocabulary has the size of the real one's, for the real cost."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    alphabet = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bpe = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    special: dict[str, Any] = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, additional_special_tokens=["<|im_start|>"], **special)
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer) if size == "tiny" else VOCABULARY,
        num_key_value_heads=SIZES[size]["num_attention_heads"] // 2,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
        **SIZES[size],
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16 if has_gpu else torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


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
                "device": "cpu" if options.cpu else "cuda",
                "dtype": "float32" if options.cpu else "bfloat16",
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
    return figures(route, watch, by_name(store, f"gpu-{route}"), is_cpu=options.cpu)


def policy_settings(options: argparse.Namespace, model: Path, route: str) -> dict[str, Any]:
    args = ["--max-model-len", str(options.tokens + 256)]
    settings: dict[str, Any] = {"model": str(model), "python": options.python}
    if options.cpu:
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


if __name__ == "__main__":
    sys.exit(main())
