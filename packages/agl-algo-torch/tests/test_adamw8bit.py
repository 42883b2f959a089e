"""AdamW with moments in 8 bits learns as torch's AdamW does, in a quarter of the memory, and resumes exactly."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from agl.schemas import Weights
from agl_algo_torch.learner.adamw8bit import AdamW8bit
from agl_algo_torch.learner.model import trainable_state
from agl_algo_torch.learner.policy_learner import LearnerSettings, PolicyLearner
from agl_objectives.settings import Compute, Lora, Optim

if TYPE_CHECKING:
    from pathlib import Path

# peft 0.21 reads an attribute that transformers 5.23 renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def task(*, seed: int) -> tuple[torch.nn.Module, Any]:
    """Return a small network, and a function that gives its loss on the next batch of a noisy task."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(24, 300), torch.nn.Tanh(), torch.nn.Linear(300, 10))
    teacher, draw = torch.randn(24, 10), torch.Generator().manual_seed(seed)

    def loss() -> torch.Tensor:
        x = torch.randn(64, 24, generator=draw)
        return torch.nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1))

    return model, loss


def curve(make: Any, *, seed: int, steps: int = 200) -> list[float]:
    model, loss = task(seed=seed)
    optimizer, found = make(model.parameters()), []
    for _ in range(steps):
        value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(value.detach()))
    return found


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
def test_losses_are_those_of_32_bits(betas: tuple[float, float]) -> None:
    def means(make: Any) -> list[float]:
        found = curve(make, seed=0)
        return [sum(found[start : start + 50]) / 50 for start in range(0, 200, 50)]

    exact = means(lambda ps: torch.optim.AdamW(ps, lr=3e-3, betas=betas, weight_decay=0.0))
    found = means(lambda ps: AdamW8bit(ps, lr=3e-3, betas=betas))

    assert exact == pytest.approx(found, abs=2e-3)  # seeds differ by 1e-2
    assert found[-1] < 0.3 < 1.0 < found[0]


def test_a_slow_moment_decays_at_its_rate_although_codes_are_farther_apart() -> None:
    weight = torch.nn.Parameter(torch.zeros(512))
    optimizer = AdamW8bit([weight], lr=1e-3, betas=(0.9, 0.999))
    weight.grad = torch.linspace(0.1, 1.0, 512)
    optimizer.step()
    before = optimizer.state[weight]["exp_avg_sq"][0].float(), optimizer.state[weight]["exp_avg_sq_scale"].clone()
    weight.grad = torch.ones(512) * 0.01
    weight.grad[[255, 511]] = 1.0  # keeps the scale of both blocks
    for _ in range(700):
        optimizer.step()

    code, scale = optimizer.state[weight]["exp_avg_sq"][0].float(), optimizer.state[weight]["exp_avg_sq_scale"]
    octaves = (before[0] - code) * 24 / 254 + (before[1][0] / scale[0]).log2()
    # v falls from 1e-5 to 0.999^700 of it, while (1 - 0.999^700) 0.01^2 is added
    left = 0.999**700 + (1 - 0.999**700) * 1e-4 / 1e-5
    assert -math.log2(left) == pytest.approx(float(octaves), abs=0.15)


def update(learner: PolicyLearner) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9, 200, 31]])
    learner.loaded.model(input_ids=ids, labels=ids).loss.backward()
    learner.apply({})


def settings(moments: Any, lora: Lora = Lora()) -> LearnerSettings:
    optim = Optim(lr=1e-3, weight_decay=0.1, moments=moments)
    return LearnerSettings(optim=optim, lora=lora, compute=Compute(device="cpu", threads=1))


def learner_of(model_dir: Path, moments: Any, **options: Any) -> PolicyLearner:
    return PolicyLearner(origin=Weights(uri=str(model_dir)), settings=settings(moments, **options))


@pytest.mark.parametrize("lora", [Lora(), Lora(rank=4)], ids=["all weights", "lora"])
def test_moments_take_a_quarter_and_a_resumed_run_continues_bit_for_bit(
    lora: Lora, model_dir: Path, tmp_path: Path
) -> None:
    learner = learner_of(model_dir, "8bit", lora=lora)
    update(learner)
    learner.save(tmp_path, step=1, keep=1)
    sizes = [t.nbytes for state in learner.optimizer.state.values() for name, t in state.items() if name != "step"]
    assert sum(sizes) <= 0.3 * 8 * sum(p.numel() for p in trainable_state(learner.loaded.model).values())
    update(learner)

    again = PolicyLearner.resume(tmp_path / "state" / "000001", settings=learner.settings)
    update(again)

    for name, tensor in trainable_state(learner.loaded.model).items():
        assert torch.equal(tensor, trainable_state(again.loaded.model)[name]), name
    assert (learner.export(tmp_path, step=2, keep=1).format) == ("lora" if lora.rank else "hf")


@pytest.mark.parametrize(("first", "then"), [("float32", "8bit"), ("8bit", "float32")])
def test_a_checkpoint_is_continued_with_the_other_kind_of_moments(
    first: str, then: str, model_dir: Path, tmp_path: Path
) -> None:
    learner = learner_of(model_dir, first)
    update(learner)
    learner.save(tmp_path, step=1, keep=1)
    start = {name: tensor.clone() for name, tensor in trainable_state(learner.loaded.model).items()}
    update(learner)

    again = PolicyLearner.resume(tmp_path / "state" / "000001", settings=settings(then))
    update(again)

    for name, tensor in trainable_state(learner.loaded.model).items():
        moved, expected = trainable_state(again.loaded.model)[name] - start[name], tensor - start[name]
        assert float((moved - expected).norm()) <= 0.2 * float(expected.norm()), name


def test_a_transposed_parameter_is_updated_as_its_contiguous_twin() -> None:
    torch.manual_seed(0)
    start, slopes = torch.randn(6, 300), torch.randn(6, 300)
    plain, turned = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.T.contiguous().T)
    for parameter in (plain, turned):
        parameter.grad = slopes.clone()
        AdamW8bit([parameter], lr=1e-2, betas=(0.9, 0.95)).step()

    assert not turned.is_contiguous()
    assert torch.equal(plain, turned)
    assert not torch.equal(plain, start)
