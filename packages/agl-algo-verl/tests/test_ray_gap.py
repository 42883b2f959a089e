"""The gap of the log-probabilities in what VERL's trainer reports, and the guard of what is replaced for it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from agl_algo_verl.patched_lines import expect_line
from agl_algo_verl.ray_gap import LARGEST, MEAN, report_gap


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of VERL's trainer, which is put back afterwards."""
    module = importlib.import_module("verl.trainer.ppo.v1.trainer_base")
    monkeypatch.setattr(module, "calculate_debug_metrics", module.calculate_debug_metrics)
    return module


def batch(mask: list[list[int]]) -> Any:
    """The input of VERL's trainer to its report: two rows whose recorded and recomputed values differ by 0.5 and 2."""
    from verl import DataProto

    recorded = torch.tensor([[-1.0, -9.0], [-3.0, -1.0]])
    tensors = {
        "rollout_log_probs": recorded,
        "old_log_probs": recorded + torch.tensor([[0.5, 2.0], [-0.5, 7.0]]),
        "response_mask": torch.tensor(mask),
        "responses": torch.zeros(2, 2, dtype=torch.int64),
    }
    return DataProto(batch=TensorDict(tensors, batch_size=2))


def test_verls_report_has_the_gap_of_trained_tokens(trainer: Any) -> None:
    report_gap()
    report_gap()
    found = trainer.calculate_debug_metrics(batch([[1, 1], [1, 0]]))
    assert (2.0, 1.0) == (found[LARGEST], found[MEAN])
    assert found["training/rollout_probs_diff_max"] < 0.5  # the unlikely token's gap does not show there
    assert LARGEST not in trainer.calculate_debug_metrics(batch([[0, 0], [0, 0]]))


def test_a_verl_without_the_line_is_left_as_it_is() -> None:
    with pytest.raises(RuntimeError, match=r"replaces no such line in .*Run: pip install"):
        expect_line(report_gap, "no such line")
