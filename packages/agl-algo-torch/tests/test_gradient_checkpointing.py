"""Gradient checkpointing gives the same gradients and keeps fewer values; and AdamW on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel, OPTConfig, OPTForCausalLM

from agl.errors import ConfigError
from agl.schemas import Weights
from agl_algo_torch.learner import policy_learner
from agl_algo_torch.learner.batch import from_tokens, micro_batches
from agl_algo_torch.learner.critic import CriticLearner
from agl_algo_torch.learner.model import checkpoint_gradients, trainable_state
from agl_algo_torch.learner.policy_learner import LearnerSettings, PolicyLearner, kept_per_token
from agl_objectives.settings import Compute, Lora, Optim

if TYPE_CHECKING:
    from pathlib import Path

# peft 0.21 reads an attribute that transformers 5.23 renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SAMPLES = [from_tokens("r", [(7 * place + n) % 200 for place in range(64)], [0, *[1] * 63]) for n in range(4)]


def learner_of(model_dir: Path, *, device: str = "cpu", lora: Lora | None = None, **settings: Any) -> PolicyLearner:
    compute = Compute(device=device, threads=1, **settings)
    made = LearnerSettings(optim=Optim(lr=1e-3), lora=lora or Lora(), compute=compute)
    return PolicyLearner(origin=Weights(uri=str(model_dir)), settings=made)


def gradient_and_kept(learner: PolicyLearner, critic: CriticLearner | None = None) -> tuple[dict[str, Any], int]:
    """Return the gradient of a pass, and the number of values kept for the backward pass, without the weights."""
    model, kept = critic.model if critic else learner.loaded.model, dict[int, int]()
    weights = {p.data_ptr() for p in model.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    device = learner.loaded.device
    (batch,) = micro_batches(SAMPLES, [1.0] * 4, total=252, token_budget=256, device=device, is_packed=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = -batch.mean(model(batch) if critic else batch.logprobs(model))
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, sum(kept.values())


@pytest.mark.parametrize("lora", [None, Lora(rank=4)])
def test_layers_computed_again_give_the_same_gradient_and_keep_less(model_dir: Path, lora: Lora | None) -> None:
    expected, kept = gradient_and_kept(learner_of(model_dir, lora=lora))
    learner = learner_of(model_dir, lora=lora, gradient_checkpointing=True)
    modes = [module.training for module in learner.loaded.model.modules()]
    for step in range(2):  # an export between passes runs the model as it serves
        found, kept_now = gradient_and_kept(learner)
        assert kept_now < kept - 4 * 64 * 64 * 10  # ten hidden states of all tokens, of two layers
        assert found.keys() == expected.keys()
        for name, slope in expected.items():
            torch.testing.assert_close(found[name], slope, rtol=1e-6, atol=1e-6)
        learner.optimizer.zero_grad()
        assert modes == [module.training for module in learner.loaded.model.modules()]
        learner.export(model_dir / "out", step=step + 1, keep=1)
        modes = [module.training for module in learner.loaded.model.modules()]


@pytest.mark.parametrize("lora", [None, Lora(rank=4)])
def test_layers_are_computed_again_by_default_where_a_pass_would_keep_half_of_the_memory_that_is_left(
    model_dir: Path, lora: Lora | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*, memory: float, **settings: Any) -> PolicyLearner:
        monkeypatch.setattr(policy_learner, "_memory", lambda _: memory)
        return learner_of(model_dir, lora=lora, **settings)

    plain = learner_of(model_dir, lora=lora)
    tuned = sum(p.numel() for p in plain.loaded.model.parameters() if p.requires_grad)
    weights = sum(p.numel() for p in plain.loaded.model.parameters())
    buffers = sum(b.nbytes for b in plain.loaded.model.buffers())
    left = 2 * 512 * kept_per_token(plain.loaded)  # beside weights, gradients, moments, and those of the server
    needed = 4 * weights + 12 * tuned + 4 * weights + buffers + left

    assert opened(memory=needed - 1, token_budget=512).checkpoints
    assert "a pass of 512 tokens would keep" in opened(memory=needed - 1, token_budget=512).notices[-1]
    assert not opened(memory=needed, token_budget=512).checkpoints
    assert not opened(memory=0, token_budget=512, gradient_checkpointing=False).checkpoints
    assert opened(memory=1e15, token_budget=512, gradient_checkpointing=True).checkpoints
    assert not opened(memory=1e15, token_budget=512, gradient_checkpointing=True).notices


def test_layers_with_eager_attention_are_computed_again_by_default(model_dir: Path) -> None:
    config = model_dir / "config.json"
    config.write_text(config.read_text().replace("{", '{"_attn_implementation": "eager", ', 1))

    learner = learner_of(model_dir)

    assert learner.checkpoints
    assert "square of a row's length" in learner.notices[-1]


@pytest.mark.parametrize("lora", [None, Lora(rank=4)])
def test_critic_computes_its_layers_again_as_the_policy_does(model_dir: Path, lora: Lora | None) -> None:
    def critic_pass(**settings: Any) -> tuple[dict[str, Any], int]:
        learner = learner_of(model_dir, lora=lora, **settings)
        critic = CriticLearner(learner, Optim(lr=1e-3), clip=0.5)
        torch.nn.init.ones_(critic.model.head.weight)  # at 0 the layers below would have no gradient
        return gradient_and_kept(learner, critic)

    expected, kept = critic_pass()
    found, kept_now = critic_pass(gradient_checkpointing=True)
    assert kept_now < kept - 4 * 64 * 64 * 10
    assert found.keys() == expected.keys()
    for name, slope in expected.items():
        torch.testing.assert_close(found[name], slope, rtol=1e-6, atol=1e-6)


def test_layers_that_drop_out_by_a_flag_of_their_own_do_not() -> None:
    torch.manual_seed(0)
    sizes: dict[str, int] = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "vocab_size": 200}
    model: Any = OPTForCausalLM(OPTConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, dropout=0.5)).eval()
    (batch,) = micro_batches(SAMPLES, [1.0] * 4, total=252, token_budget=256, device=torch.device("cpu"))

    def scores_and_gradient() -> dict[str, torch.Tensor]:
        model.zero_grad()
        logp_M = batch.logprobs(model)
        logp_M.sum().backward()
        return {"": logp_M.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = scores_and_gradient()
    checkpoint_gradients(model)
    torch.testing.assert_close(scores_and_gradient(), expected)
    assert not any(module.training for module in model.modules())


def test_a_model_whose_layers_cannot_be_computed_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, int] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 9}
    model = BertLMHeadModel(BertConfig(**sizes, intermediate_size=8, is_decoder=True))
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    with pytest.raises(ConfigError, match="layers of BertLMHeadModel cannot be computed again"):
        checkpoint_gradients(model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_fused_optimizer_of_a_gpu_resumes_where_it_stopped(model_dir: Path, tmp_path: Path) -> None:
    def update(learner: PolicyLearner) -> dict[str, torch.Tensor]:
        gradient_and_kept(learner)
        learner.apply({})
        return {name: tensor.clone() for name, tensor in trainable_state(learner.loaded.model).items()}

    learner = learner_of(model_dir, device="cuda", gradient_checkpointing=True)
    assert all(group["fused"] for group in learner.optimizer.param_groups)
    update(learner)
    learner.save(tmp_path, step=1, keep=1)
    expected = update(learner)
    again = PolicyLearner.resume(tmp_path / "state" / "000001", settings=learner.settings)
    for name, tensor in update(again).items():
        torch.testing.assert_close(tensor, expected[name])
