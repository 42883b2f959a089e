"""Make a small chat model from nothing: `python make_model.py --data out/data --out out/model --seed 0`.

The tokenizer is trained on the rendered dialogues, the chat template is the string below, and the weights are
random: nothing is downloaded. What comes out is an ordinary Hugging Face directory.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
VOCABULARY = 900

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
{%- if message.content %} {{ message.content | trim }}{% endif %}
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
{%- endif -%}
"""


def rendered(path: Path, tokenizer: Qwen2Tokenizer) -> list[str]:
    """Return the dialogues as the text that the model will see."""
    texts: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for message in row["messages"]:
            for call in message.get("tool_calls", []):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        texts.append(tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False))
    return texts


def make_tokenizer(dialogues: Path) -> Qwen2Tokenizer:
    """Train byte-level BPE on the dialogues; the words of names become single tokens, so they can be copied."""
    blank = Qwen2Tokenizer()
    blank.chat_template = TEMPLATE
    tokenizer = blank.train_new_from_iterator(
        rendered(dialogues, blank), vocab_size=VOCABULARY, new_special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.pad_token = "<|endoftext|>"
    return tokenizer


def make_model(tokenizer: Qwen2Tokenizer, *, seed: int) -> Qwen2ForCausalLM:
    """Return a two-layer transformer with about a million random weights, ready to learn to copy."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=480,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=512,
        # A small base for short contexts: fast dimensions tell neighbours apart, slow ones match words at any distance.
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    for layer in model.model.layers:
        start_as_copy(layer.self_attn)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
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
