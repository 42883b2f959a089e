"""Make two small chat models from nothing: `python make_model.py --data out/data --out out --seed 0`.

One tokenizer is trained on the dialogues, the chat template is the string below, and the weights are random: nothing
is downloaded. What comes out are two ordinary Hugging Face directories, `writer` and the smaller `checker`.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>"]
VOCABULARY = 768
CONTEXT = 320
SIZES = {"writer": 192, "checker": 96}

TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def rendered(paths: Sequence[Path], tokenizer: Qwen2Tokenizer) -> Iterator[str]:
    """Yield the dialogues as the text that a model will see."""
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            yield tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)


def make_tokenizer(paths: Sequence[Path]) -> Qwen2Tokenizer:
    """Train byte-level BPE on the dialogues; digits stay single tokens, so numbers can be copied."""
    blank = Qwen2Tokenizer()
    blank.chat_template = TEMPLATE
    tokenizer = blank.train_new_from_iterator(
        rendered(paths, blank), vocab_size=VOCABULARY, new_special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.pad_token = "<|endoftext|>"
    return tokenizer


def make_model(tokenizer: Qwen2Tokenizer, *, width: int, seed: int) -> Qwen2ForCausalLM:
    """Return a two-layer transformer with random weights; of width 192 it has about a million."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=width * 5 // 2,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=CONTEXT,
        # A small base keeps neighbouring positions apart, which copying in short contexts needs.
        rope_parameters={"rope_type": "default", "rope_theta": 30.0},
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    return model


def main() -> None:
    """Write the model directories."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("out/data"))
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tokenizer = make_tokenizer([options.data / "write.jsonl", options.data / "check.jsonl"])
    for name, width in SIZES.items():
        model = make_model(tokenizer, width=width, seed=options.seed)
        model.save_pretrained(options.out / name)
        tokenizer.save_pretrained(options.out / name)
        count = sum(p.numel() for p in model.parameters())
        print(f"made a model of {count:,} weights and {len(tokenizer)} tokens in {options.out / name}")


if __name__ == "__main__":
    main()
