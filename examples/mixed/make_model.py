"""Make the writer, a small chat model, from nothing: `python make_model.py --data out/data --out out/writer --seed 0`.

The tokenizer, trained on the rendered dialogues, takes words and numbers as wholes, so that every fact in a letter is
one to three tokens. The chat template is the string below and the weights are random: nothing is downloaded. What
comes out is an ordinary Hugging Face directory.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, GraniteConfig, GraniteForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 1200

TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def rendered(path: Path, tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    """Yield the text that the model will see, without the special tokens."""
    marks = re.compile("|".join(map(re.escape, SPECIAL)))
    for line in path.read_text(encoding="utf-8").splitlines():
        yield from marks.split(tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False))


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Return the tokenizer as transformers has it, with the chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=TEMPLATE,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )


def make_tokenizer(dialogues: Path) -> PreTrainedTokenizerFast:
    """Train byte-level BPE on the dialogues; its units are the form's labels, and words with the space before them."""
    tokenizer = Tokenizer(models.BPE())
    units = pre_tokenizers.Split(Regex(r"\w+:| ?\w+|[^\w\n]+|\n"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [units, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
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
    """Return a two-layer transformer with about half a million random weights.

    Granite is a Llama by another name whose tokenizer transformers loads as it was saved.
    """
    torch.manual_seed(seed)
    config = GraniteConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_multiplier=64**-0.5,
        attention_bias=True,
        # Wider than usual: with small weights a model of this size takes long to discover how to copy.
        initializer_range=0.06,
        max_position_embeddings=160,
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
    parser.add_argument("--out", type=Path, default=Path("out/writer"))
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
