"""Fixtures: a tiny random model with a byte-level tokenizer and a ChatML template with tools."""

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from agl.contracts import POLICY_KEY_ENV
from agl_algo_torch.learner.model import LoadedModel
from agl_algo_torch.serving.policy import TorchPolicy

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('strange role') }}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Run torch in one thread; the models are so small that a second one would only wait."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    """`make_tokenizer(merges=...)` makes a byte-level tokenizer with merges such as `("a", "b")`."""

    def make(*, merges: tuple[tuple[str, str], ...] = ()) -> Any:
        vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        for left, right in merges:
            vocabulary[left + right] = len(vocabulary)
        bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        bpe.decoder = decoders.ByteLevel()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=bpe,
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            additional_special_tokens=["<|im_start|>"],
        )
        tokenizer.chat_template = TEMPLATE
        return tokenizer

    return make


@pytest.fixture(scope="session")
def make_loaded(make_tokenizer: Callable[..., Any]) -> Callable[..., LoadedModel]:
    """`make_loaded(seed=..., merges=...)` makes a random Qwen2 of two layers with a tokenizer."""

    def make(*, seed: int = 0, merges: tuple[tuple[str, str], ...] = (), context: int = 1024) -> LoadedModel:
        tokenizer = make_tokenizer(merges=merges)
        torch.manual_seed(seed)
        config = Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=context,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=True,
        )
        return LoadedModel(
            name="tiny", model=Qwen2ForCausalLM(config).eval(), tokenizer=tokenizer, device=torch.device("cpu")
        )

    return make


@pytest.fixture
def serve(make_loaded: Callable[..., LoadedModel]) -> Iterator[Callable[..., TorchPolicy]]:
    """`serve(loaded, **options)` starts a policy named `tiny`, which is stopped at the end of the test."""
    policies: list[TorchPolicy] = []

    def start(loaded: LoadedModel | None = None, **options: Any) -> TorchPolicy:
        policy = TorchPolicy(name="tiny", model=loaded or make_loaded(), **options)
        policies.append(policy)
        asyncio.run(policy.start())
        return policy

    yield start
    for policy in policies:
        asyncio.run(policy.stop())


@pytest.fixture
def connect() -> Iterator[Callable[[TorchPolicy], openai.OpenAI]]:
    """`connect(policy)` makes a client of a started policy, without retries."""
    clients: list[openai.OpenAI] = []

    def make(policy: TorchPolicy) -> openai.OpenAI:
        clients.append(openai.OpenAI(base_url=policy.base_url, api_key=os.environ[POLICY_KEY_ENV], max_retries=0))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture(scope="session")
def saved_model(make_loaded: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny model, which no test changes."""
    folder, made = tmp_path_factory.mktemp("saved"), make_loaded()
    with torch.no_grad():
        made.model.model.embed_tokens.weight.mul_(8.0)  # else adapters below a frozen head could not matter
    made.model.save_pretrained(folder)
    made.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def model_dir(saved_model: Path, tmp_path: Path) -> Path:
    """Directory of a tiny model that the test may change."""
    return Path(shutil.copytree(saved_model, tmp_path / "model"))
