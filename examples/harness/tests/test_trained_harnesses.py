"""Claude Code and Codex train a small model: a step of grpo each, from tokens that the model sampled.

Both speak APIs that no server of a policy returns token ids in, so the gateway translates their calls. The model's chat
template shows it no instructions and no tools, which would be tens of thousands of tokens of English; it has learnt by
heart to call a shell, and to end when it has seen a result.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agl_harness", reason="needs agl-harness")
pytest.importorskip("agl_algo_torch", reason="needs agl-algo-torch and torch")

from agl.contracts import RolloutQuery
from agl.episodes import build_episode
from agl_store_sqlite import SQLiteStore

ROOT = Path(__file__).parents[3]
SHELLS = {
    "claude-code": ("Bash", {"command": "echo made > FILE", "description": "make"}, ["--tools", "Bash"]),
    "codex": ("exec_command", {"cmd": "echo made > FILE"}, []),
}
"""The tool of each that runs commands, its arguments, and arguments of the harness."""

TASK = "Make the file."
TEMPLATE = """\
{%- for message in messages if message.role != 'system' -%}
{%- if message.role == 'user' and message.content[-1] == '>' %}{% continue %}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{{- message.content if message.role == 'assistant' else message.content[-12:] }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

MAKE_MODEL = """\
import sys
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

torch.manual_seed(0)
vocabulary = {char: at for at, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
bpe.decoder = decoders.ByteLevel()
ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "additional_special_tokens": ["<|im_start|>"]}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **ends)
tokenizer.chat_template = sys.argv[1]
sizes = dict(hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
ids = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
config = Qwen2Config(vocab_size=len(tokenizer), max_position_embeddings=2048, tie_word_embeddings=True, **sizes, **ids)
model = Qwen2ForCausalLM(config)
model.generation_config = GenerationConfig(**ids)
model.save_pretrained("model")
tokenizer.save_pretrained("model")
"""

EXPERIMENT = """\
[experiment]
name = "trained"
validate_every = 0
harness = "{harness}"
workspace = "workspace"
store = "sqlite:///runs.db"
train = "tasks.jsonl"
seed = 0

[runner]
concurrency = 2
timeout_s = 240
params = {{ context = 1000000, output = 200, keep = "never", arguments = {arguments} }}

[[reward]]
use = "tests"
params = {{ command = "test -s made.txt", score = "exit" }}

[policy.llm]
use = "torch"
model = "model"
threads = 1
context_length = 2048

[[algorithm]]
use = "sft"
tunes = "llm"
params.data = "dialogues.jsonl"
params.updates = 300
params.updates_per_step = 300
params.batch_size = 4
params.optim = {{ lr = 4e-3 }}
params.compute = {{ threads = 1 }}

[[algorithm]]
use = "grpo"
tunes = "llm"
params = {{ steps = 1, tasks_per_step = 1, group_size = 8, optim.lr = 1e-3, compute.threads = 1 }}

[schedule]
mode = "sequential"
"""


def agl(*words: str, folder: Path) -> str:
    line = [sys.executable, "-P", "-m", "agl", *words]
    done = subprocess.run(line, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=600)
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout


def environment(folder: Path) -> dict[str, str]:
    return {"AGL_HARNESSES": str(ROOT / ".nox" / "harnesses"), **os.environ, "XDG_STATE_HOME": str(folder / "state")}


def dialogue(tool: str, arguments: dict[str, Any], file: str) -> str:
    """A dialogue in which the shell makes a file."""
    command = json.dumps(arguments).replace("FILE", file)
    call = {"id": "c", "type": "function", "function": {"name": tool, "arguments": command}}
    messages = [
        {"role": "user", "content": TASK},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "(no output)"},
        {"role": "assistant", "content": "Made."},
    ]
    return json.dumps({"messages": messages}) + "\n"


async def counts(folder: Path) -> list[tuple[int, int, int]]:
    """The calls of each rollout of grpo, the tokens that were sampled, and those that its rows train."""
    found: list[tuple[int, int, int]] = []
    store = SQLiteStore(f"sqlite:///{folder}/runs.db")
    try:
        for rollout in await store.rollouts(RolloutQuery(status=("succeeded",))):
            (attempt,) = await store.attempts(rollout.rollout_id)
            spans = await store.spans(rollout.rollout_id, attempt_id=attempt.attempt_id)
            calls = [span.call for span in spans if span.call is not None]
            assert all(("chat", "") == (call.dialect, call.ids_missing) for call in calls)
            rows = build_episode(rollout, attempt, spans, policy="llm").rows
            found.append((len(calls), sum(call.response_len for call in calls), sum(sum(row.mask) for row in rows)))
    finally:
        await store.close()
    return found


@pytest.mark.soak
@pytest.mark.parametrize("name", SHELLS)
def test_harness_trains_a_policy_by_a_step_of_grpo(name: str, tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("needs Node.js, which brings npm")
    install = [sys.executable, "-m", "agl", "harness", "install", name]
    done = subprocess.run(install, env=environment(tmp_path), capture_output=True, text=True, timeout=900)
    if done.returncode:
        pytest.skip(f"{name} cannot be installed here: {done.stderr.strip()}")
    tool, arguments, words = SHELLS[name]
    subprocess.run([sys.executable, "-c", MAKE_MODEL, TEMPLATE], cwd=tmp_path, check=True, timeout=300)
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / "README").write_text("empty", encoding="utf-8")
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": TASK}) + "\n", encoding="utf-8")
    taught = [dialogue(tool, arguments, file) for file in ("made.txt", "lost.txt")]
    (tmp_path / "dialogues.jsonl").write_text("".join(taught), encoding="utf-8")
    (tmp_path / "experiment.toml").write_text(
        EXPERIMENT.format(harness=name, arguments=json.dumps(words)), encoding="utf-8"
    )
    agl("run", "experiment.toml", folder=tmp_path)
    logged = json.loads(agl("metrics", "trained", "--store", "runs.db", "--json", folder=tmp_path))
    step = {row["name"]: row["value"] for row in logged if row["algorithm"] == "grpo"}
    found = asyncio.run(counts(tmp_path))
    assert 8 == len(found) == step["rollouts"] == step["rows"]
    assert all(sampled == trained > 0 for _, sampled, trained in found)
    assert any(calls > 1 for calls, _, _ in found)
    assert step["grad_norm"] > 0
    assert step["logprob_gap"] < 1e-3
