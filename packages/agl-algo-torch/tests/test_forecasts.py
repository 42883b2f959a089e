"""The forecasts of ``agl check --forecast`` are near the measured memory of a step and time of an update."""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2Config, Qwen2ForCausalLM

from agl.errors import ConfigError
from agl.schemas import Weights
from agl_algo_torch.grpo import GRPO
from agl_algo_torch.learner import policy_learner
from agl_algo_torch.learner.batch import micro_batches
from agl_algo_torch.learner.model import checkpoint_gradients
from agl_algo_torch.learner.packing import pack, packs_rows
from agl_algo_torch.learner.policy_learner import LearnerSettings, PolicyLearner, random_row, update_seconds
from agl_algo_torch.learner.scoring import find_head
from agl_inspect.forecast import costs
from agl_inspect.forecast.costs import Training, memory_of
from agl_inspect.forecast.models import shape_from, shape_of_model
from agl_objectives.settings import Compute, Optim

from .token_world import made

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from agl_algo_torch.learner.batch import RowSample

ROWS, TOKENS, TRAINED = 4, 128, 32
SMALL = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "vocab_size": 512}
WIDE = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 4096}


class Peak(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive, and their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self._known = weakref.WeakSet[Any]()

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._known:
            self._known.add(storage)
            weakref.finalize(storage, self._drop, storage.nbytes())
            self.live += storage.nbytes()
            self.most = max(self.most, self.live)

    def _drop(self, size: int) -> None:
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return found


def peak_of(sizes: dict[str, int], *, is_checkpointed: bool, dtype: torch.dtype | None) -> int:
    """Return the largest number of bytes during the second update of a model, with weights and moments."""
    torch.manual_seed(0)
    config = Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    model = Qwen2ForCausalLM(config).eval()
    if dtype is not None:
        model.agl_computed_dtype = dtype
    if is_checkpointed:
        checkpoint_gradients(model)
    find_head(model)
    pack(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=False)
    rows = [random_row(number, TOKENS, TRAINED, sizes["vocab_size"]) for number in range(ROWS)]

    def step() -> None:
        for _ in range(2):  # gradients of the first batch are there while the second one runs
            for batch in micro_batches(
                rows, [1.0] * ROWS, token_budget=10**6, device=torch.device("cpu"), is_packed=packs_rows(model)
            ):
                (-(batch.advantages_M * batch.scores(model, has_entropy=True).logp_M).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    peak = Peak()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    for tensor in [*model.parameters(), *moments]:
        peak.add(tensor)
    with peak:
        step()
    return peak.most


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "is_checkpointed", "dtype"),
    [
        (SMALL, False, "float32"),
        (SMALL, False, "bfloat16"),
        (SMALL, True, "float32"),
        (SMALL, True, "bfloat16"),
        (WIDE, False, "bfloat16"),
        (WIDE, True, "float32"),
        (WIDE, True, "bfloat16"),
    ],
    ids=lambda value: f"{value['hidden_size']}-wide" if isinstance(value, dict) else str(value),
)
def test_memory_of_a_step_is_what_the_forecast_says(sizes: dict[str, int], is_checkpointed: bool, dtype: str) -> None:
    shape = shape_from(
        {**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}, name="tiny"
    )
    training = Training(dtype=dtype, gradient_checkpointing=is_checkpointed)

    forecast = memory_of(shape, training, tokens=ROWS * TOKENS, trained=ROWS * TRAINED).training
    real = peak_of(sizes, is_checkpointed=is_checkpointed, dtype=torch.bfloat16 if dtype == "bfloat16" else None)

    assert forecast == pytest.approx(real, rel=0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trainer_and_forecast_agree_on_what_a_pass_keeps(
    dtype: Literal["float32", "bfloat16"], model_dir: Path
) -> None:
    settings = LearnerSettings(optim=Optim(), compute=Compute(device="cpu", dtype=dtype))
    learner = PolicyLearner(origin=Weights(uri=str(model_dir)), settings=settings)
    training = Training(dtype=dtype)

    forecast = costs.kept_per_token(shape_of_model(str(model_dir), folder=model_dir), training)

    assert forecast == pytest.approx(policy_learner.kept_per_token(learner.loaded), rel=0.1)
    assert costs.KEPT_SHARE == policy_learner.KEPT_SHARE


def test_update_is_measured_on_rows_of_the_given_lengths(model_dir: Path) -> None:
    grpo = made(GRPO, steps=1, tasks_per_step=2, group_size=4, threads=1, device="cpu", updates_per_step=2, kl_coef=0.1)

    seconds = grpo.measure_update(Weights(uri=str(model_dir)), [(40, 10)] * 8)

    assert 0.0 < seconds < 60.0


def test_measurement_of_many_long_rows_tries_a_part_and_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_learner, "MEASURED_S", 0.4)
    tried: list[int] = []

    def update(rows: Sequence[RowSample]) -> None:
        tried.append(len(rows))
        time.sleep(0.02 * len(rows))

    seconds = update_seconds(update, [(10, 5)] * 10_000, vocabulary=99)

    assert 4 < max(tried) <= 1.5 * 0.4 / 0.02
    assert 10_000 * 0.02 == pytest.approx(seconds, rel=0.5)


def test_rows_of_a_token_and_answers_longer_than_rows_are_measured(model_dir: Path) -> None:
    grpo = made(GRPO, steps=1, tasks_per_step=2, group_size=4, threads=1, device="cpu")

    assert grpo.measure_update(Weights(uri=str(model_dir)), [(1, 1), (5, 9), (3, 0)]) > 0


def test_weights_that_are_not_here_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        made(GRPO, steps=1).measure_update(Weights(uri="./nowhere"), [(4, 2)])
