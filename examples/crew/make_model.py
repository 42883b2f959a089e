"""Make a small chat model from nothing: `python make_model.py --data out/data --out out/model --seed 0`.

CrewAI's prompts are long, and most of their words never change. So the tokenizer, trained on the rendered dialogues,
may join whole lines: what never changes becomes one token, while digits stay single, so that numbers can be copied.
The chat template is the string below and the weights are random: nothing is downloaded. What comes out is an ordinary
Hugging Face directory.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, GraniteConfig, GraniteForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
VOCABULARY = 2000

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


def rendered(path: Path, tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    """Yield the text that the model will see, without the special tokens."""
    marks = re.compile("|".join(map(re.escape, SPECIAL)))
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for message in row["messages"]:
            for call in message.get("tool_calls", []):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        text = tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
        yield from marks.split(text)


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Return the tokenizer as transformers has it, with the chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=TEMPLATE,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<tool_call>", "</tool_call>"],
    )


def make_tokenizer(dialogues: Path) -> PreTrainedTokenizerFast:
    """Train byte-level BPE on the dialogues, whose units are lines and digits instead of words."""
    tokenizer = Tokenizer(models.BPE())
    lines = pre_tokenizers.Split(Regex(r"\d|\n|[^\d\n]+"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [lines, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(rendered(dialogues, wrap(tokenizer)), trainer=trainer)
    return wrap(tokenizer)


def make_model(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> GraniteForCausalLM:
    """Return a two-layer transformer with about a million random weights.

    Granite is a Llama by another name whose tokenizer transformers loads as it was saved.
    """
    torch.manual_seed(seed)
    config = GraniteConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=480,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        attention_multiplier=64**-0.5,
        attention_bias=True,
        # Wider than usual: with small weights a model of this size takes long to discover how to copy.
        initializer_range=0.06,
        max_position_embeddings=512,
        # A small base keeps neighbouring positions apart, which copying in short contexts needs.
        rope_parameters={"rope_type": "default", "rope_theta": 30.0},
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = GraniteForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    return model


def main() -> None:
    """Write the model directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("out/data"))
    parser.add_argument("--out", type=Path, default=Path("out/model"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tokenizer = make_tokenizer(options.data / "dialogues.jsonl")
    model = make_model(tokenizer, seed=options.seed)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    count = sum(p.numel() for p in model.parameters())
    print(f"made a model of {count:,} weights and {len(tokenizer)} tokens in {options.out}")


if __name__ == "__main__":
    main()
