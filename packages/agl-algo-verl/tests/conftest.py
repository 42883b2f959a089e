"""A tiny model with a byte-level tokenizer, and a world in which tokens of a certain kind are rewarded."""

from __future__ import annotations

import runpy
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from agl_algo_verl.runtime import prepare

if TYPE_CHECKING:
    from collections.abc import Callable

prepare()  # before any test, because VERL's imports warn

EXAMPLES = Path(__file__).parents[3] / "examples"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Run torch in one thread; the models are so small that a second one would only wait."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_model(seed=...)` returns the directory of a random two-layer Qwen2 with its tokenizer."""

    def make(*, seed: int = 0) -> Path:
        target = tmp_path_factory.mktemp("model")
        vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        bpe.decoder = decoders.ByteLevel()
        tokenizer: Any = PreTrainedTokenizerFast(
            tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>"
        )
        tokenizer.chat_template = TEMPLATE
        torch.manual_seed(seed)
        config = Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=True,
        )
        Qwen2ForCausalLM(config).save_pretrained(target)
        tokenizer.save_pretrained(target)
        return target

    return make


@pytest.fixture(scope="session")
def model_dir(make_model: Callable[..., Path]) -> Path:
    """Directory of a saved tiny model."""
    return make_model()


@pytest.fixture(scope="session")
def calc_with_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a copy of the calculator example with its data and model, in this process, which has imported torch."""
    folder = tmp_path_factory.mktemp("calc") / "calc"
    shutil.copytree(EXAMPLES / "calc", folder, ignore=shutil.ignore_patterns("out", "tests"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["make.py", "--out", "out/data"])
        runpy.run_path("make_data.py", run_name="__main__")
        patch.setattr(sys, "argv", ["make.py"])
        runpy.run_path(str(EXAMPLES / "make_model.py"), run_name="__main__")
    return folder


@pytest.fixture
def calc(calc_with_model: Path, tmp_path: Path) -> Path:
    """Return a copy of the calculator example, with its data and model."""
    return shutil.copytree(calc_with_model, tmp_path / "calc")
