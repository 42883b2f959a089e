"""Make a small chat model from nothing: `python make_model.py --data out/data --out out/model --seed 0`.

pi sends five and a half kilobytes with each request: its instructions, and four tools with their schemas. All of it is
in the model's prompt, and every line that is the same in all requests is one token: a model of this size could not
read English anyway. The rest is byte pairs, trained on what is left of the dialogues. Nothing is downloaded.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
VOCABULARY = 768
CONTEXT = 512
# Words, single digits, operators, and everything between them: a name has the same token wherever it stands, so that a
# small model can copy it.
PARTS = r"[A-Za-z]+|[0-9]|[-+*<>=]+|[^A-Za-z0-9\-+*<>=]+"

# ChatML with the tools' whole schemas in the system turn; calls are written as <tool_call>{json}</tool_call>.
TEMPLATE = """\
<|im_start|>system
{{ messages[0].content }}
{% for tool in tools or [] -%}
{{ tool | tojson }}
{% endfor %}<|im_end|>
{% for message in messages -%}
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


def rendered(dialogues: Path) -> list[str]:
    """Return the dialogues as the text that the model will see."""
    blank = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=TEMPLATE)
    texts: list[str] = []
    for line in dialogues.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for message in row["messages"]:
            for call in message.get("tool_calls", []):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        texts.append(str(blank.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)))
    return texts


def common_lines(texts: Sequence[str]) -> list[str]:
    """Return the lines with words that all texts have in their system turn, in order."""
    heads = [text.split("<|im_end|>")[0].splitlines(keepends=True)[1:] for text in texts]
    common = set(heads[0]).intersection(*heads)
    return [line for line in dict.fromkeys(heads[0]) if line in common and line.strip()]


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Make the tokenizer: a token for each line that all requests have, byte pairs for the rest."""
    lines = common_lines(texts)
    rest = ["".join(line for line in text.splitlines(keepends=True) if line not in lines) for text in texts]
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PARTS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(rest, trainer)
    tokenizer.add_tokens([AddedToken(line, normalized=False, special=False) for line in lines])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=TEMPLATE, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


def make_model(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> Qwen2ForCausalLM:
    """Return a two-layer transformer with less than half a million random weights."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        # A small base keeps neighbouring positions apart, and large weights let it copy after a hundred updates.
        rope_parameters={"rope_type": "default", "rope_theta": 30.0},
        initializer_range=0.08,
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
    """Write the model directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("out/data"))
    parser.add_argument("--out", type=Path, default=Path("out/model"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    texts = rendered(options.data / "dialogues.jsonl")
    tokenizer = make_tokenizer(texts)
    model = make_model(tokenizer, seed=options.seed)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    count = sum(p.numel() for p in model.parameters())
    longest = max(len(tokenizer(text)["input_ids"]) for text in texts)
    print(f"made a model of {count:,} weights and {len(tokenizer)} tokens in {options.out}; ", end="")
    print(f"the longest dialogue has {longest} of them")


if __name__ == "__main__":
    main()
