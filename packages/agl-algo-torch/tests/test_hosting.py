"""Adapters that other programs train and sample from: the state after an error, a load and a cancellation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from agl.errors import AglError
from agl_algo_torch.serving.hosting import AdamStep, Adapter, HostedModel, Sampler, SampleRequest, TargetRow, Trainee
from agl_algo_torch.serving.sampling import Draw
from agl_algo_torch.serving.sequence import EngineError, Generation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

# peft 0.21 reads an attribute that transformers 5.23 renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

IDS = [10, 20, 30, 40, 50, 60, 70]
ROWS = [TargetRow(ids=IDS[:n], targets=IDS[1 : n + 1]) for n in (6, 5)]


def likelihood(logp_N: Tensor, inputs: Mapping[str, Tensor], row_N: Tensor) -> Tensor:
    del inputs, row_N
    return -logp_N


def fails_from(number: int, error: Callable[[Tensor], Tensor]) -> Any:
    """Return a loss that applies `error` from its pass `number` on."""
    passes = [0]

    def loss(logp_N: Tensor, inputs: Mapping[str, Tensor], row_N: Tensor) -> Tensor:
        passes[0] += 1
        value_N = likelihood(logp_N, inputs, row_N)
        return error(value_N) if passes[0] >= number else value_N

    return loss


def refuse(_: Tensor) -> Tensor:
    raise KeyError("weights")


@pytest.fixture
def trainee(model_dir: Path) -> Trainee:
    return HostedModel(str(model_dir), token_budget=6).trainee(Adapter(rank=2, head=False))  # a pass for each row


@pytest.mark.parametrize("error", [refuse, lambda value_N: value_N * math.inf])
def test_error_in_a_later_pass_discards_the_gradient_of_the_passes_before(trainee: Trainee, error: Any) -> None:
    with pytest.raises((KeyError, AglError)):
        trainee.run(ROWS, fails_from(2, error), has_gradient=True)
    assert 0.0 == trainee.step(AdamStep(lr=0.1))


@pytest.mark.parametrize("error", [refuse, lambda value_N: value_N * math.inf])
def test_error_of_a_forward_pass_leaves_the_gradient(trainee: Trainee, error: Any) -> None:
    trainee.run(ROWS, likelihood, has_gradient=True)
    with pytest.raises((KeyError, AglError)) as caught:
        trainee.run(ROWS, fails_from(2, error), has_gradient=False)
    assert "discarded" not in str(caught.value)
    assert trainee.step(AdamStep(lr=0.1)) > 0


def test_loaded_trainee_goes_on_as_the_saved_one_did(trainee: Trainee, tmp_path: Path) -> None:
    def update() -> list[list[float]]:
        trainee.run(ROWS, likelihood, has_gradient=True)
        trainee.step(AdamStep(lr=0.1))
        return trainee.run(ROWS, likelihood, has_gradient=False)[1]

    trainee.save(tmp_path / "fresh")  # without moments
    expected = update()
    trainee.run(ROWS, likelihood, has_gradient=True)  # no update uses it
    trainee.load(tmp_path / "fresh", moments=True)
    assert expected == update()


@pytest.mark.parametrize("event", ["error", "result"])
def test_withdrawal_just_before_the_answer_does_not_disturb_the_engine(model_dir: Path, event: str) -> None:
    sampler = HostedModel(str(model_dir)).sampler()
    try:
        ended = wait_for_the_listener(sampler)
        ended(EngineError("failed") if event == "error" else a_generation())
    finally:
        sampler.close()


def wait_for_the_listener(sampler: Sampler) -> Callable[[Any], None]:
    """Return the engine's listener of a request that is cancelled right after the listener has checked for that."""
    taken: list[Any] = []

    def submit(_: Any, *, listeners: list[Any]) -> list[Any]:
        taken.extend(listeners)
        return []

    sampler._engine.submit = submit
    done: Any = sampler.sample(SampleRequest(prompt_ids=(1, 2), max_tokens=2))
    done.cancel()
    done.done = lambda: False  # as it was a moment before
    return taken[0]


def a_generation() -> Generation:
    return Generation(draws=(Draw(token_id=1, logprob=-1.0),), finish_reason="stop", versions=())
