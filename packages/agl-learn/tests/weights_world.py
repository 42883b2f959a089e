"""A world whose users wish for one word: a tiny model that knows a few words, its agent, and its users over HTTP."""

import json
from pathlib import Path
from urllib.request import Request, urlopen

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

WORDS = ("kind", "rude", "short", "where", "when", "why")
QUESTIONS = WORDS[3:]

AGENT = """
import json
from urllib.request import Request, urlopen


def ask(base_url, key, question, headers={}):
    # The name of the policy, and not that of the version: the gateway chooses the version.
    body = {"model": "small", "messages": [{"role": "user", "content": question}], "max_tokens": 1, "temperature": 1}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **headers}
    with urlopen(Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers), timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def solve(task, small):
    return ask(small.base_url, small.api_key, task["question"])


def wish(rollout, spans):
    said = [span.attributes["agl.output"] for span in spans if "agl.output" in span.attributes]
    return float(rollout.task["said"].split()[-1] == said[-1]) if said else None
"""

FILE = """
[experiment]
name = "desk"
agent = "desk_agent:solve"
store = "sqlite:///runs/desk.db"
hidden = ["said"]

[policy.small]
use = "torch"
model = "model"
device = "cpu"
threads = 1

[[reward]]
use = "desk_agent:wish"

[[algorithm]]
use = "grpo"
tunes = "small"

[algorithm.params]
steps = 8
tasks_per_step = 3
group_size = 16
lora = { rank = 4, targets = ["q_proj", "v_proj", "up_proj", "down_proj", "lm_head"] }
optim = { lr = 0.03 }

[learn.support]
tunes = ["small"]
every = 36
settle = "1s"

[learn.support.gate]
replay = { tasks = 60 }
canary = { share = [0.5], units = 6, guard = [] }
holdback = 0.3
"""


def make_model(folder: Path, *, seed: int = 0, favourite: str = "") -> None:
    """Save a model with random weights, which answers with any word, or mostly with a favourite one."""
    special = ["<|im_end|>", "<|endoftext|>", "<|im_start|>"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<|endoftext|>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=0,
        pad_token_id=1,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config)
    if favourite:
        with torch.no_grad():
            # The norm before the head leaves a vector of length sqrt(32), so this is far above the other logits.
            model.model.norm.weight.zero_()
            model.model.norm.weight[0] = 1.0
            model.lm_head.weight[:, 0] = 0.0
            model.model.embed_tokens.weight[:, 0] = 100.0
            model.lm_head.weight[vocabulary[favourite], 0] = 10.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prepare(folder: Path) -> None:
    """Write the model, the agent and the experiment's file."""
    make_model(folder / "model")
    (folder / "desk_agent.py").write_text(AGENT, encoding="utf-8")
    (folder / "desk.toml").write_text(FILE, encoding="utf-8")
    (folder / "runs").mkdir()


class User:
    """A user of the gateway, who wishes for a word and rates every answer."""

    def __init__(self, url: str, *, token: str, name: str) -> None:
        self._url, self._token, self._name = url, token, name

    def converse(self, number: int, *, wish: str) -> str:
        """Ask a question, rate the answer and return it; raises :class:`OSError` if no answer comes."""
        talk = {"x-agl-conversation-id": f"talk-{number}", "x-agl-user-id": self._name}
        messages = [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}]
        body = {"model": "small", "messages": messages, "max_tokens": 1}
        answer = self._post("/v1/chat/completions", body, talk)["choices"][0]["message"]["content"]
        self._post("/conversations/rate", {"value": float(answer == wish), "feedback": f"wanted {wish}"}, talk)
        self._post("/conversations/end", {}, talk)
        return answer

    def _post(self, path: str, body: object, headers: dict[str, str]) -> dict:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json", **headers}
        with urlopen(Request(self._url + path, json.dumps(body).encode(), headers), timeout=30) as answer:
            return json.load(answer)
