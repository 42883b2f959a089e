"""Rows are packed if possible; otherwise they are padded, and a message gives the reason."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agl.errors import ConfigError
from agl_algo_verl.local.worker import check_device
from agl_algo_verl.ray.configuration import compose
from agl_algo_verl.rows.batches import micro_batched
from agl_algo_verl.rows.rows import RowSample
from agl_algo_verl.settings.packing import with_packing
from agl_algo_verl.settings.ray import read_ray_settings
from agl_algo_verl.settings.settings import read_settings
from agl_testing.conformance.bench import AlgorithmBench

from .world import config, scenario

FP32 = {"actor.fsdp_config.mixed_precision.param_dtype": "fp32"}


def decided(keys: dict[str, Any], **machine: bool) -> tuple[bool, list[str]]:
    """Return whether rows are packed, and the messages about that."""
    found, told = with_packing(read_settings(config(**keys))[0], **machine)
    return found.is_packed, told


@pytest.mark.parametrize(
    ("keys", "machine", "expected", "reason"),
    [
        ({}, {"has_gpu": True, "has_kernels": True}, True, ""),
        ({}, {"has_gpu": False, "has_kernels": True}, False, "because there is no GPU"),
        ({}, {"has_gpu": True, "has_kernels": False}, False, "flash-attn is not installed (pip install flash-attn"),
        (FP32, {"has_gpu": True, "has_kernels": True}, False, "actor_rollout_ref.actor.fsdp_config.mixed_precision"),
        (
            {"algorithm.adv_estimator": "gae", "critic.fsdp.mixed_precision.param_dtype": "fp32"},
            {"has_gpu": True, "has_kernels": True},
            False,
            "critic.fsdp.mixed_precision",
        ),
    ],
    ids=["packed", "no GPU", "no kernels", "float32", "critic"],
)
def test_rows_are_packed_where_they_can_be(
    keys: dict[str, Any], machine: dict[str, bool], expected: bool, reason: str
) -> None:
    is_packed, told = decided(keys, **machine)
    assert expected == is_packed
    assert [True] * bool(reason) == [reason in line for line in told]


@pytest.mark.parametrize(
    "keys",
    [
        {"model.use_remove_padding": False},
        {"model.use_remove_padding": True},
        {"actor.ppo_micro_batch_size_per_gpu": 2},
    ],
    ids=str,
)
def test_what_a_person_decides_stays_and_nothing_is_said(keys: dict[str, Any]) -> None:
    is_packed, told = decided(keys, has_gpu=True, has_kernels=True)
    assert (keys.get("model.use_remove_padding", False), []) == (is_packed, told)


def test_packed_rows_are_refused_without_a_gpu() -> None:
    settings, _ = read_settings(config(**{"model.use_remove_padding": True}))
    with pytest.raises(ConfigError, match=r"use_remove_padding need a GPU"):
        check_device(settings, torch.device("cpu"))
    open_one, _ = read_settings(config())
    check_device(open_one, torch.device("cpu"))


def test_a_run_without_a_gpu_says_once_why_rows_are_padded(model_dir: Path, tmp_path: Path) -> None:
    bench, said = AlgorithmBench(scenario(model_dir), tmp_path), list[str]()

    async def body() -> None:
        async with bench:
            algorithm = bench.scenario.make()
            await algorithm.setup(replace(bench.context(), say=said.append))

    asyncio.run(body())
    assert 1 == sum("rows are padded" in line for line in said)


@pytest.mark.parametrize("has_kernels", [True, False])
def test_the_cluster_gets_the_same_choice(has_kernels: bool) -> None:
    read = read_ray_settings(config(**{"rollout.name": "vllm"}))
    settings, _ = with_packing(read.settings, has_gpu=True, has_kernels=has_kernels)
    options = {"model": "m", "folder": Path("f"), "steps": 3, "tasks": 2, "checkpoint": None, "threads": 1}
    whole: Any = compose(replace(read, settings=settings), **options)
    model = whole.actor_rollout_ref.model
    expected = (True, "flash_attention_2") if has_kernels else (False, "sdpa")
    assert expected == (model.use_remove_padding, model.override_config.attn_implementation)


def test_packed_passes_stay_within_the_budget_that_padded_ones_leave_far_behind() -> None:
    """A pass costs what VERL's own division gives: the tokens of its rows, or its number of rows times the longest."""
    from verl.workers.engine.utils import prepare_micro_batches

    budget, lengths = 16_384, [4096, *[120] * 400]
    rows = [
        RowSample(
            rollout=str(place),
            group=0,
            ids=torch.zeros(length, dtype=torch.int64),
            mask=torch.ones(length - 1, dtype=torch.bool),
            advantages=torch.zeros(length - 1),
            behaviour=torch.zeros(length - 1),
            temperature=1.0,
        )
        for place, length in enumerate(lengths)
    ]
    found = micro_batched(rows, rows=None, tokens=budget, device=torch.device("cpu"))
    passes, _ = prepare_micro_batches(data=found)
    sizes = [part["input_ids"].offsets().diff() for part in passes]
    assert max(int(size.sum()) for size in sizes) <= budget
    assert max(int(len(size) * size.max()) for size in sizes) > 4 * budget
