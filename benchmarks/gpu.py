"""``python -m benchmarks.gpu``: everything that only a GPU can show, in at most ten minutes and without a network.

Stages, in order; ``--only`` chooses some:

- ``tests``: the tests that are marked ``gpu``;
- ``training``: tokens per second of updates of all weights; the most memory, compared with the forecast;
- ``quantized``: LoRA on a base in 4 bits, compared with one in bfloat16: memory, loss after the same updates, speed;
- ``generation``: tokens per second of the policy's server, compared with transformers' `generate` on the same batch;
- ``calc`` and ``sql``: the examples, `sft` and then `grpo`, with a model of random weights;
- ``vllm``: a run that vLLM serves, for each way to bring new weights into it; needs vLLM (``--python``).

It makes its own models of random weights. Without a GPU, the same stages run in a small form on the CPU, which shows
that the program works and measures nothing.

It needs agl-gateway, agl-rewards, agl-langchain, agl-algo-torch[lora], openai, langgraph and langchain-openai.
Not part of ``python -m benchmarks``, which runs on every machine.
"""

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from benchmarks import _gpu_examples, _gpu_generation, _gpu_vllm
from benchmarks._harness import Figure, table

SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
VOCABULARY = 151_936
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Stage = Callable[[argparse.Namespace, Path, Path], list[Figure]]
STAGES: dict[str, Stage] = {
    "tests": _gpu_examples.marked_tests,
    **{name: _gpu_examples.measured(name) for name in ("training", "quantized")},
    "generation": _gpu_generation.generation,
    "calc": _gpu_examples.calc,
    "sql": _gpu_examples.sql,
    "vllm": _gpu_vllm.routes,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages, each even if an earlier one failed; returns 1 if any failed."""
    options = options_of(arguments)
    print(where(options), flush=True)
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", size=options.size, has_gpu=not options.is_small)
        for name in options.only:
            started = time.perf_counter()
            try:
                if figures := STAGES[name](options, model, Path(folder) / name):
                    print(table(figures))
            except Exception as error:  # noqa: BLE001 - a stage that fails must not cost the others
                failed.append(name)
                print(f"{name} failed: {type(error).__name__}: {error}")
            print(f"[{name}: {time.perf_counter() - started:.0f} s]\n", flush=True)
    return int(bool(failed))


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    has_gpu, has_vllm = torch.cuda.is_available(), importlib.util.find_spec("vllm") is not None
    usual = [name for name in STAGES if name != "vllm" or has_vllm]
    parser.add_argument("--only", choices=STAGES, nargs="+", default=usual, help="all by default, without vLLM no vllm")
    parser.add_argument("--size", choices=SIZES, default="0.5b" if has_gpu else "tiny")
    vllm = parser.add_argument_group("vllm")
    vllm.add_argument("--python", default=sys.executable, help="the interpreter that has vLLM; this one by default")
    vllm.add_argument("--routes", choices=_gpu_vllm.ROUTES, nargs="+", help="all by default, on a CPU without sleep")
    vllm.add_argument("--steps", type=int, default=4, help="the first is warm-up and not counted; at least 2")
    vllm.add_argument("--tasks", type=int, default=32, help="groups per step")
    vllm.add_argument("--group", type=int, default=8, help="rollouts per group")
    vllm.add_argument("--tokens", type=int, default=512, help="tokens of an answer")
    return parser.parse_args(arguments, argparse.Namespace(is_small=not has_gpu))


def where(options: argparse.Namespace) -> str:
    """Return the device and the versions, which belong to every figure."""
    card = "the CPU, a trial that measures nothing" if options.is_small else torch.cuda.get_device_name()
    return f"{card}; torch {torch.__version__}, transformers {transformers.__version__}; model {options.size}"


def make_model(folder: Path, *, size: str, has_gpu: bool) -> Path:
    """Write a random Qwen2 that speaks bytes; its vocabulary has the size of the real one's, for the real cost."""
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
    with torch.device("cuda" if has_gpu else "cpu"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16 if has_gpu else torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    sys.exit(main())
