"""Packed rows have the log-probabilities of rows that run alone, and no token is computed twice."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from agl.schemas import Weights
from agl_algo_torch.learner.batch import RowSample, from_tokens, micro_batches
from agl_algo_torch.learner.critic import CriticLearner
from agl_algo_torch.learner.model import add_lora, load_model
from agl_algo_torch.learner.packing import pack, packs_rows
from agl_algo_torch.learner.policy_learner import LearnerSettings, PolicyLearner
from agl_algo_torch.learner.scoring import find_head
from agl_objectives.settings import Compute, Lora, Optim

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# peft 0.21 reads an attribute that transformers 5.23 renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def rows(*lengths: int) -> list[RowSample]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for number, length in enumerate(lengths):
        ids = torch.randint(60, (length,), generator=generator).tolist()
        row = from_tokens(f"r{number}", ids, [int(place % 3 == number % 3) for place in range(length)])
        made.append(replace(row, temperature=torch.linspace(0.5, 1.5, length)))
    return made


def learn(model: Any, samples: list[RowSample], *, is_packed: bool) -> tuple[dict[int, Any], dict[str, Any]]:
    """Return the log-probabilities of each row, and the gradient of their weighted sum."""
    model.zero_grad()
    (batch,) = micro_batches(samples, [1.0] * len(samples), token_budget=10_000, device=CPU, is_packed=is_packed)
    logp_M = batch.logprobs(model)
    (torch.sin(batch.row_M + 1.0) * logp_M).sum().backward()
    slopes = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return batch.scatter(logp_M.detach()), slopes


def assert_packs(model: Any) -> None:
    samples = rows(9, 1, 30, 2, 17)
    expected, slopes = learn(model, samples, is_packed=False)
    assert pack(model) == ""
    assert packs_rows(model)
    found, own = learn(model, samples, is_packed=True)
    for number, logp_T in expected.items():
        torch.testing.assert_close(found[number], logp_T, rtol=1e-6, atol=1e-6)
    assert own.keys() == slopes.keys()
    for name, slope in slopes.items():
        assert float((own[name] - slope).norm()) <= 1e-6 * max(1.0, float(slope.norm())), name


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), id="llama"),
        pytest.param(
            lambda: GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=2)), id="learnt-positions"
        ),
    ],
)
def test_packed_rows_have_the_values_and_gradients_of_padded_ones(model: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    assert_packs(model().eval())


def test_packed_rows_have_the_values_and_gradients_of_padded_ones_under_lora(make_loaded: Callable[..., Any]) -> None:
    model: Any = add_lora(make_loaded().model, Lora(rank=4))
    for name, p in model.named_parameters():
        if "lora_B" in name:  # it begins at zero, where one half of the gradient is zero too
            torch.nn.init.normal_(p, std=0.02)
    find_head(model)
    assert_packs(model)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(
            lambda: MambaForCausalLM(MambaConfig(vocab_size=60, hidden_size=32, num_hidden_layers=2, state_size=4)),
            id="no-attention",
        ),
        pytest.param(lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)), id="sliding-window"),
    ],
)
def test_a_model_that_cannot_be_packed_says_so_and_pads(model: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    made = model().eval()
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    before = made(input_ids=ids).logits
    assert "cannot be packed" in pack(made)
    assert not packs_rows(made)
    assert torch.equal(before, made(input_ids=ids).logits)


def test_a_master_in_half_precision_is_packed_although_products_round_by_the_number_of_rows(model_dir: Path) -> None:
    model = load_model(str(model_dir), device="cpu", dtype="bfloat16", is_master=True).model

    def round_like_a_gpu(layer: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * (1 + 2**-8) if inputs[0].shape[1] > 7 else output  # one bit of bfloat16

    for layer in [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]:
        layer.register_forward_hook(round_like_a_gpu)
    assert pack(model) == ""


def test_a_packed_model_gives_what_it_gave_in_other_passes_and_saves_no_trace(
    make_loaded: Callable[..., Any], tmp_path: Path
) -> None:
    model = make_loaded().model
    ids, attention = torch.tensor([[3, 1, 4, 1], [5, 9, 0, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    before = model(input_ids=ids, attention_mask=attention).logits
    assert pack(model) == ""
    assert torch.equal(before, model(input_ids=ids, attention_mask=attention).logits)
    model.save_pretrained(tmp_path)
    assert "agl" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))


def test_a_budget_of_packed_rows_counts_their_tokens_and_no_padding() -> None:
    samples = rows(60, *[10] * 14)
    packed = list(micro_batches(samples, [1.0] * 15, token_budget=100, device=CPU, is_packed=True))
    padded = list(micro_batches(samples, [1.0] * 15, token_budget=100, device=CPU))
    assert [sum(batch.lengths) for batch in packed] == [100, 100]
    assert [len(batch.lengths) for batch in padded] == [1, 10, 4]
    shapes = [tuple(batch.run(lambda **inputs: inputs["input_ids"][..., None]).shape) for batch in packed]
    assert shapes == [(len(batch.targets_M), 1) for batch in packed]


def test_policy_and_critic_are_packed_when_they_are_opened(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = LearnerSettings(optim=Optim(lr=1e-3), compute=Compute(device="cpu", threads=1))
    learner = PolicyLearner(origin=Weights(uri=str(model_dir)), settings=settings)
    assert learner.notices == ()
    assert packs_rows(learner.loaded.model)
    critic = CriticLearner(learner, settings.optim, clip=0.0)
    torch.nn.init.normal_(critic.model.head.weight)
    samples, shapes = rows(9, 30, 2), []
    trunk: Any = critic.model.trunk
    trunk.register_forward_pre_hook(lambda *given: shapes.append(given[-1]["input_ids"].shape), with_kwargs=True)
    values = critic.values(samples)
    assert shapes == [(1, 41)]
    alone = [critic.values([sample])[0] for sample in samples]
    for expected, found in zip(alone, values, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
