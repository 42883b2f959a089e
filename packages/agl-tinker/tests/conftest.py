"""A tiny random model, and servers of the model in this process."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"

import pytest
import tinker
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from agl_tinker.server.running import ServeSettings

from .world import KEY, Served

TEMPLATE = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def pytest_configure(config: pytest.Config) -> None:
    """Ignore warnings about a deprecated call in peft, and about a connection that the published client leaves open."""
    for one in (
        "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
        "ignore:unclosed:ResourceWarning",
        "ignore:(?s)Exception ignored in.*(socket|Transport):pytest.PytestUnraisableExceptionWarning",
    ):
        config.addinivalue_line("filterwarnings", one)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Use one thread, since with so small a model a second thread would only wait for the first."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random Qwen2 of two layers with a byte-level tokenizer."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("models") / "tiny"
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def launch(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Served]]:
    """Return `launch(**settings)`, which starts a server that is stopped after the test."""
    running: list[Served] = []

    def start(**settings: Any) -> Served:
        given = {"model": str(model_dir), "folder": tmp_path_factory.mktemp("checkpoints"), "threads": 1, **settings}
        running.append(Served(ServeSettings(**given)))
        return running[-1]

    yield start
    for served in running:
        served.stop()


@pytest.fixture(scope="session")
def served(launch: Callable[..., Served]) -> Served:
    """Start a server that several tests share."""
    return launch()


@pytest.fixture
def connect(served: Served) -> Iterator[Callable[..., tinker.ServiceClient]]:
    """Return `connect(url=...)`, which creates a published client of a server."""
    clients: list[tinker.ServiceClient] = []

    def make(url: str = "", key: str = KEY) -> tinker.ServiceClient:
        clients.append(tinker.ServiceClient(base_url=url or served.url, api_key=key))
        return clients[-1]

    yield make
    for client in clients:
        client.close("success").result()
