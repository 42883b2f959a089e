"""Training in bfloat16 keeps small updates, follows the path of float32, and exports bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from agl.schemas import Weights
from agl_algo_torch.learner.batch import from_tokens, micro_batches
from agl_algo_torch.learner.model import Reference, load_model, trainable_state
from agl_algo_torch.learner.policy_learner import LearnerSettings, PolicyLearner
from agl_algo_torch.learner.typed_torch import backward, modules
from agl_objectives.settings import Compute, Optim

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

UPDATES = 100
BFLOAT16 = 2.0**-8
"""The largest relative error of rounding to bfloat16."""

SAMPLES = [from_tokens("r", [10 * n, 20, 30 + n, 40, 50, 60 + n], [0, 1, 1, 1, 1, 1]) for n in range(1, 5)]


def learner_of(model_dir: Path, dtype: str) -> PolicyLearner:
    settings = LearnerSettings(optim=Optim(lr=1e-6), compute=Compute(device="cpu", dtype=dtype, threads=1))
    return PolicyLearner(origin=Weights(uri=str(model_dir)), settings=settings)


def train(learner: PolicyLearner, updates: int = UPDATES) -> list[float]:
    """Train and return the loss before each update."""
    losses: list[float] = []
    for _ in range(updates):
        (batch,) = micro_batches(SAMPLES, [1.0] * 4, total=20.0, token_budget=100, device=learner.loaded.device)
        loss = -batch.mean(batch.logprobs(learner.loaded.model))
        backward(loss)
        learner.apply({})
        losses.append(float(loss.detach()))
    return losses


def weights_of(learner: PolicyLearner) -> Tensor:
    return torch.cat([tensor.float().flatten() for tensor in trainable_state(learner.loaded.model).values()])


def test_reference_of_a_master_computes_the_same_in_less_memory(model_dir: Path) -> None:
    model = learner_of(model_dir, "bfloat16").loaded.model
    (batch,) = micro_batches(SAMPLES, [1.0] * 4, total=20.0, token_budget=100, device=torch.device("cpu"))

    with Reference(model).active() as frozen, torch.no_grad():
        torch.testing.assert_close(batch.logprobs(model), batch.logprobs(frozen), rtol=0, atol=0)
        sizes = [sum(p.numel() * p.element_size() for p in each.parameters()) for each in (model, frozen)]
    linear = [layer for _, layer in modules(model) if isinstance(layer, torch.nn.Linear)]
    layers = sum(p.numel() for layer in linear if layer is not model.lm_head for p in layer.parameters())
    assert sizes[0] - 2 * layers == sizes[1]


def test_small_updates_in_bfloat16_move_the_weights_along_the_path_of_float32(model_dir: Path) -> None:
    half, full = learner_of(model_dir, "bfloat16"), learner_of(model_dir, "float32")
    start = weights_of(half).clone()

    losses, expected = train(half), train(full)

    moved = weights_of(half) != start
    assert moved.float().mean() >= 0.99
    assert expected == pytest.approx(losses, rel=BFLOAT16)
    way, way_of_float32 = weights_of(half) - start, weights_of(full) - start
    assert float((weights_of(half) - weights_of(full)).norm()) <= BFLOAT16 * float(weights_of(full).norm())
    assert float(torch.nn.functional.cosine_similarity(way, way_of_float32, dim=0)) > 0.95


def test_passes_compute_in_bfloat16(model_dir: Path) -> None:
    learner = learner_of(model_dir, "bfloat16")
    (batch,) = micro_batches(SAMPLES, [1.0] * 4, token_budget=100, device=learner.loaded.device)
    seen: list[torch.dtype] = []
    model: Any = learner.loaded.model
    model.lm_head.register_forward_hook(lambda *given: seen.append(given[-1].dtype))
    batch.logprobs(model)
    assert seen == [torch.bfloat16]
    assert {torch.float32} == {tensor.dtype for tensor in trainable_state(learner.loaded.model).values()}


def test_exported_weights_have_the_type_and_are_the_rounded_masters(model_dir: Path, tmp_path: Path) -> None:
    learner = learner_of(model_dir, "bfloat16")
    train(learner, 3)
    served = load_model(learner.export(tmp_path, step=1, keep=1).uri, device="cpu", dtype="bfloat16").model
    found = dict(served.named_parameters())
    for name, master in learner.loaded.model.named_parameters():
        assert torch.equal(master.detach().to(torch.bfloat16), found[name].detach()), name
    config = (tmp_path / "weights" / "000001" / "config.json").read_text()
    assert '"bfloat16"' in config


def test_resumed_run_in_bfloat16_continues_from_the_masters(model_dir: Path, tmp_path: Path) -> None:
    learner = learner_of(model_dir, "bfloat16")
    train(learner, 3)
    learner.save(tmp_path, step=1, keep=1)
    again = PolicyLearner.resume(tmp_path / "state" / "000001", settings=learner.settings)
    assert torch.equal(weights_of(learner), weights_of(again))
    assert train(learner, 2) == train(again, 2)
