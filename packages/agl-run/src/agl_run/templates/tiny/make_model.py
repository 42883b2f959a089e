"""Make the model of experiment.toml from nothing: a tokenizer for dialogues.jsonl, and random weights."""

import json
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

lines = Path("dialogues.jsonl").read_text(encoding="utf-8").splitlines()
texts = [f"{message['role']}\n{message['content']}" for line in lines for message in json.loads(line)["messages"]]
tokenizer = Qwen2Tokenizer().train_new_from_iterator(
    texts, vocab_size=400, new_special_tokens=[START, END], show_progress=False
)
tokenizer.chat_template, tokenizer.eos_token, tokenizer.pad_token = TEMPLATE, END, PAD

config = Qwen2Config(
    vocab_size=len(tokenizer),
    hidden_size=96,
    intermediate_size=240,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=3,
    max_position_embeddings=64,
    rope_parameters={"rope_type": "default", "rope_theta": 30.0},  # keeps neighbouring positions apart
    initializer_range=0.1,  # weights this wide learn faster in so small a model
    tie_word_embeddings=True,
    eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id,
)
torch.manual_seed(0)
model = Qwen2ForCausalLM(config)
model.save_pretrained("model")
tokenizer.save_pretrained("model")
print(f"made a model of {model.num_parameters():,} weights and {len(tokenizer)} tokens in model")
