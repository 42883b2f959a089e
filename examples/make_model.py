"""Make the small chat models of an example from nothing: `python ../make_model.py --out out --seed 0`, in its folder.

`model.toml` there gives the sizes. The tokenizer is trained on the dialogues in `out/data`, and the weights are random:
nothing is downloaded. Each result is an ordinary Hugging Face directory below `out`.
"""

import argparse
import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    GraniteConfig,
    GraniteForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

TURN, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CALL = ["<tool_call>", "</tool_call>"]

# ChatML with tools: their signatures go into the system turn, calls are written as <tool_call>{json}</tool_call>.
TEMPLATE = """\
{%- if tools or messages[0].role == 'system' -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif -%}
{%- for tool in tools or [] %} {{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})
{%- endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
<|im_start|>assistant
{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role != 'system' -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def rendered(files: Sequence[Path], *, template: str = TEMPLATE) -> list[str]:
    """Return the dialogues as the text that the model will see."""
    blank = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=template)
    texts: list[str] = []
    for line in "".join(file.read_text(encoding="utf-8") for file in files).splitlines():
        row = json.loads(line)
        for message in row["messages"]:
            for call in message.get("tool_calls", []):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        texts.append(str(blank.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)))
    return texts


def make_tokenizer(texts: Sequence[str], spec: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Train byte-level BPE on the dialogues; digits stay single tokens, so that numbers can be copied.

    `units` is a regular expression of what byte pairs may join, where Qwen's words are too small. With `line_tokens`
    each line that all requests share is one token: a model of this size could not read English anyway.
    """
    special = [TURN, END, *(CALL if any(CALL[0] in text for text in texts) else [])]
    template, size = spec.get("template", TEMPLATE), spec["vocabulary"]
    if "units" not in spec:
        blank = Qwen2Tokenizer()
        words = blank.train_new_from_iterator(texts, vocab_size=size, new_special_tokens=special, show_progress=False)
        words.chat_template, words.eos_token, words.pad_token = template, END, PAD
        return words
    lines = common_lines(texts) if spec.get("line_tokens") else []
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(spec["units"]), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[PAD, *special], initial_alphabet=alphabet, show_progress=False
    )
    marks = re.compile("|".join(map(re.escape, special)))
    rest = ["".join(line for line in text.splitlines(keepends=True) if line not in lines) for text in texts]
    tokenizer.train_from_iterator((part for text in rest for part in marks.split(text)), trainer=trainer)
    tokenizer.add_tokens([AddedToken(line, normalized=False, special=False) for line in lines])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[token for token in special if token != END],
    )


def common_lines(texts: Sequence[str]) -> list[str]:
    """Return the lines with words that all texts have in their system turn, in order."""
    heads = [text.split(END)[0].splitlines(keepends=True)[1:] for text in texts]
    common = set(heads[0]).intersection(*heads)
    return [line for line in dict.fromkeys(heads[0]) if line in common and line.strip()]


def make_model(
    tokenizer: PreTrainedTokenizerFast, spec: dict[str, Any], *, width: int, seed: int
) -> Qwen2ForCausalLM | GraniteForCausalLM:
    """Return a two-layer transformer with random weights; of width 192 it has about a million."""
    torch.manual_seed(seed)
    heads = spec.get("heads", 3)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": width * 5 // 2,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": spec["context"],
        # A small base keeps neighbouring positions apart, which copying in short contexts needs.
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.get("rope_theta", 30.0)},
        # Wider than usual in some: with small weights a model of this size takes long to discover how to copy.
        "initializer_range": spec.get("initializer_range", 0.02),
        "tie_word_embeddings": True,
        **ends,
    }
    if spec.get("architecture") == "granite":  # a Llama by another name, whose tokenizer loads as it was saved
        scale = (width / heads) ** -0.5
        model = GraniteForCausalLM(GraniteConfig(attention_multiplier=scale, attention_bias=True, **sizes))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    if spec.get("starts_as_copy"):
        for layer in model.model.layers:
            start_as_copy(layer.self_attn)
    model.generation_config = GenerationConfig(do_sample=True, **ends)
    return model


@torch.no_grad()
def start_as_copy(attention: torch.nn.Module) -> None:
    """Let a layer's attention begin by looking for words like the current one and passing on what it finds.

    Queries and keys start as one random rotation, values and outputs as another and its inverse (after Trockman and
    Kolter 2023, "Mimetic initialization of self-attention layers", arXiv 2305.09828). A model that was trained on text
    has long learned to copy names; from weights drawn independently this takes several times as many dialogues.
    """
    size = attention.o_proj.weight.shape[0]
    match, carry = (torch.linalg.qr(torch.randn(size, size))[0] for _ in range(2))
    for projection, weight in (("q", match / 2), ("k", match / 2), ("v", carry), ("o", carry.T)):
        getattr(attention, f"{projection}_proj").weight.copy_(weight)


def main() -> None:
    """Write a directory for each model of the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path, nargs="?", default=Path("model.toml"))
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of data/ and of the models")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    spec = tomllib.loads(options.spec.read_text(encoding="utf-8"))
    files = [options.out / "data" / name for name in spec.get("dialogues", ["dialogues.jsonl"])]
    texts = rendered(files, template=spec.get("template", TEMPLATE))
    tokenizer = make_tokenizer(texts, spec)
    for name, width in spec["models"].items():
        model = make_model(tokenizer, spec, width=width, seed=options.seed)
        model.save_pretrained(options.out / name)
        tokenizer.save_pretrained(options.out / name)
        count = sum(p.numel() for p in model.parameters())
        print(f"made a model of {count:,} weights and {len(tokenizer)} tokens in {options.out / name}")


if __name__ == "__main__":
    main()
