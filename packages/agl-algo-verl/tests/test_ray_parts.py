"""The parts of engine = "ray" that need no cluster: rows for VERL, checkpoints, and repairs that know their VERL."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from agl.errors import AglError
from agl_algo_verl.ray_engine import forget_after, prune
from agl_algo_verl.ray_process import expect
from agl_algo_verl.ray_rows import rows_for_verl
from agl_algo_verl.rows import Prepared, Sample

if TYPE_CHECKING:
    from pathlib import Path

    from agl_algo_verl.bridge import Answer


def sample(rollout: str, *, group: int = 0, tokens: int = 2, temperature: float = 1.0) -> Sample:
    return Sample(
        rollout=rollout,
        group=group,
        ids=torch.arange(3 + tokens),
        mask=torch.ones(tokens, dtype=torch.bool),
        advantages=torch.full((tokens,), 6.0),
        behaviour=torch.zeros(tokens),
        temperature=temperature,
    )


def prepared(*samples: Sample, rollouts: list[tuple[str, int]]) -> Prepared:
    return Prepared(samples=list(samples), rollouts=rollouts, metrics={"rows_prompt_too_long": 2.0})


def test_rows_are_named_by_task_rollout_and_part() -> None:
    rollouts = [("a", 0), ("b", 0), ("c", 1)]
    samples = (sample("a"), sample("a", tokens=1), sample("c", group=1))
    answer: Answer = rows_for_verl(prepared(*samples, rollouts=rollouts), mode="token-mean", step=1)
    assert [(0, 0, 0), (0, 0, 1), (1, 0, 0)] == [(row.group, row.rollout, row.part) for row in answer.rows]
    assert (0, 1.0) == (answer.rollouts, answer.temperature)


def test_a_mean_over_sequences_counts_rollouts_even_those_without_rows() -> None:
    samples = (sample("a"), sample("a", tokens=1))
    answer: Answer = rows_for_verl(
        prepared(*samples, rollouts=[("a", 0), ("b", 0)]), mode="seq-mean-token-mean", step=1
    )
    assert 2 == answer.rollouts
    assert [[4.0, 4.0], [2.0]] == [row.advantages.tolist() for row in answer.rows]


def test_rows_that_verl_cannot_train_are_refused() -> None:
    with pytest.raises(AglError, match=r"no row to train .*too_long.*max_prompt_length"):
        rows_for_verl(prepared(rollouts=[("a", 0)]), mode="token-mean", step=4)
    mixed = prepared(sample("a"), sample("b", temperature=0.5), rollouts=[("a", 0), ("b", 0)])
    with pytest.raises(AglError, match=r"temperatures \[0.5, 1.0\]"):
        rows_for_verl(mixed, mode="token-mean", step=4)


def test_checkpoints_of_uncounted_steps_and_old_ones_are_removed(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11):
        (tmp_path / f"global_step_{step}").mkdir()
    forget_after(tmp_path, step=10)
    assert {8, 9, 10} == {int(path.name[12:]) for path in tmp_path.iterdir()}
    prune(tmp_path, step=10, keep=2)
    assert {9, 10} == {int(path.name[12:]) for path in tmp_path.iterdir()}


def test_a_line_that_verl_no_longer_has_is_not_repaired() -> None:
    with pytest.raises(RuntimeError, match="this VERL has no such line"):
        expect(test_rows_that_verl_cannot_train_are_refused, 'f"another:{line}"')
