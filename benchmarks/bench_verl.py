"""One step's update by VERL in one process against agl-algo-torch, on the same rollouts and the same model.

The model has a million weights, random; a rollout is two calls on one row. Both algorithms do one update on all rows;
VERL recomputes the log-probabilities before it, which agl-algo-torch's does in the same pass.
What a pass computes with packed and with padded rows follows from VERL's own cut of rows into micro-batches: the tokens
of its rows, or its rows times the longest.
Run alone: ``python -m benchmarks.bench_verl``; it needs agl-algo-verl and agl-algo-torch in one environment.
"""

import asyncio
import random
import statistics
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agl.schemas import Episode, Row, Segment, Transition, Weights, pack_floats, pack_ids
from agl_testing.conformance import AlgorithmBench, AlgorithmScenario, RolloutOrder
from benchmarks._harness import Figure, component, table

TASKS, ROLLOUTS, PROMPT, CALL, OBSERVED = 8, 8, 80, 30, 20
VOCABULARY = 400
BUDGET = 16_384
"""Tokens of a pass, `ppo_max_token_len_per_gpu`."""


def run(*, quick: bool) -> list[Figure]:
    """All rows of the table; none where VERL is not installed."""
    if not all(map(find_spec, ("agl_algo_verl", "agl_algo_torch", "verl"))):
        return []
    with tempfile.TemporaryDirectory() as folder:
        return figures(Path(folder), steps=3 if quick else 8)


def figures(folder: Path, *, steps: int) -> list[Figure]:
    """Seconds of an update, medians after one step of warm-up, interleaved."""
    model = make_model(folder / "model")
    found = asyncio.run(measure(folder, model, steps=steps + 1))
    verl_s, torch_s = (statistics.median([m["update_s"] for m in found[name][1:]]) for name in ("verl", "torch"))
    return [
        Figure(name="an update of 64 rollouts by VERL in one process", value=verl_s, unit="s", better="lower"),
        Figure(
            name="the same over an update by agl-algo-torch",
            value=verl_s / torch_s,
            unit="x",
            bar=3.0,
            better="lower",
            baseline=1.0,
            baseline_name=f"agl-algo-torch, {torch_s:.2f} s",
        ),
        Figure(
            name="recomputed log-probabilities off the recorded ones, float32",
            value=max(m["logprob_gap"] for m in found["verl"][:1]),
            unit="nats",
            bar=1e-5,
            better="lower",
        ),
        *passes(),
    ]


def passes() -> list[Figure]:
    """Tokens that the largest pass computes, over its budget, on 256 rows of agents with few and with many turns."""
    import torch
    from verl.utils.tensordict_utils import get_tensordict
    from verl.workers.engine.utils import prepare_micro_batches

    source = random.Random(0)
    lengths = [min(8192, int(source.lognormvariate(6.0, 1.0))) for _ in range(256)]
    rows: Any = torch.nested.as_nested_tensor([torch.zeros(n, dtype=torch.int64) for n in lengths], layout=torch.jagged)
    data = get_tensordict(tensor_dict={"input_ids": rows}, non_tensor_dict={"max_token_len_per_gpu": BUDGET})
    sizes = [part["input_ids"].offsets().diff() for part in prepare_micro_batches(data=data)[0]]
    packed, padded = (max(found) for found in zip(*((int(s.sum()), int(len(s) * s.max())) for s in sizes), strict=True))
    return [
        Figure(
            name=f"tokens of the largest packed pass, budget {BUDGET}",
            value=packed,
            unit="",
            bar=BUDGET,
            better="lower",
        ),
        Figure(
            name="tokens of the largest padded pass over the packed one",
            value=padded / packed,
            unit="x",
            baseline=1.0,
            baseline_name=f"packed, {packed} tokens; padded {padded}",
        ),
    ]


async def measure(folder: Path, model: Path, *, steps: int) -> dict[str, list[dict[str, float]]]:
    """The metrics of every step of both algorithms, which take turns."""
    makers = {"verl": make_verl, "torch": make_torch}
    worlds = {name: world(folder / name, model, make, steps=steps) for name, make in makers.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in makers}
    algorithms: dict[str, Any] = {}
    for name, bench in worlds.items():
        async with bench:
            algorithms[name] = bench.scenario.make()
            await algorithms[name].setup(bench.context())
    for _ in range(steps):
        for name, algorithm in algorithms.items():
            found[name].append((await algorithm.step()).metrics)
    return found


def world(folder: Path, model: Path, make: Any, *, steps: int) -> AlgorithmBench:
    """A bench whose rollouts are the same random tokens for both algorithms."""
    scenario = AlgorithmScenario(
        make=lambda: make(steps), play=Player(model).play, tunes=("llm",), resources={"llm": Weights(uri=str(model))}
    )
    return AlgorithmBench(scenario, folder)


class Player:
    """Plays rollouts of random tokens, with the first model's log-probabilities."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(model)

    def play(self, order: RolloutOrder) -> Episode:
        """Two calls on one row, with something observed between them."""
        import torch

        rollout, source = order.rollout, random.Random(order.rollout.rollout_id)
        ids = [source.randrange(VOCABULARY) for _ in range(PROMPT + 2 * CALL + OBSERVED)]
        second = PROMPT + CALL + OBSERVED
        parts = [
            Segment(start=start, stop=start + CALL, span_id=f"{rollout.rollout_id}/{start}")
            for start in (PROMPT, second)
        ]
        with torch.no_grad():
            logp = self._model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        logprobs = [0.0, *(float(logp[t, token]) for t, token in enumerate(ids[1:]))]
        mask = [any(part.start <= place < part.stop for part in parts) for place in range(len(ids))]
        row = Row(
            rollout_id=rollout.rollout_id,
            attempt_id=rollout.attempt_id,
            group_id=rollout.group_id,
            branch=0,
            ids=pack_ids(ids),
            mask=bytes(map(int, mask)),
            logprobs=pack_floats(p if m else 0.0 for p, m in zip(logprobs, mask, strict=True)),
            segments=tuple(parts),
        )
        calls = tuple(
            Transition(rollout_id=rollout.rollout_id, attempt_id=rollout.attempt_id, span_id=part.span_id)
            for part in parts
        )
        return Episode(rollout=rollout, attempt=None, reward=source.random(), transitions=calls, rows=(row,))


def make_verl(steps: int) -> Any:
    """VERL in one process, on one thread."""
    return component(
        "algorithm",
        "verl",
        threads=1,
        data={"train_batch_size": TASKS},
        actor_rollout_ref={"rollout": {"n": ROLLOUTS}, "actor": {"optim": {"lr": 1e-4}}},
        trainer={"total_training_steps": steps},
    )


def make_torch(steps: int) -> Any:
    """The same by agl-algo-torch."""
    return component(
        "algorithm", "grpo", steps=steps, tasks_per_step=TASKS, group_size=ROLLOUTS, lr=1e-4, threads=1, device="cpu"
    )


def make_model(target: Path, *, vocabulary: int = VOCABULARY, hidden: int = 192, layers: int = 2) -> Path:
    """A random Qwen2 with a byte-level tokenizer; of a million weights by default."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(target)
    save_tokenizer(target)
    return target


def save_tokenizer(target: Path) -> None:
    """Save a tokenizer of bytes, whose template writes the messages one behind the other."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={char: place for place, char in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    print(table(run(quick=False)))
