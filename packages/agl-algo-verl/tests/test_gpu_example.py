"""The GPU examples are read and checked as a whole, because no test runs them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from verl.utils.config import validate_config

from agl.errors import ConfigError
from agl_algo_verl.ray.configuration import compose
from agl_algo_verl.settings.ray import RaySettings, check_machine, read_ray_settings

EXAMPLES = Path(__file__).parents[3] / "examples"
SAME = ("agent", "train", "val", "hidden")


def read(name: str) -> dict[str, Any]:
    return tomllib.loads((EXAMPLES / name).read_text())


def params(content: dict[str, Any]) -> RaySettings:
    given: dict[str, Any] = content["algorithm"][-1]["params"]
    assert "ray" == given.pop("engine")
    return read_ray_settings(given)


def check(settings: RaySettings, *, ranks: int = 1) -> Any:
    """Compose VERL's configuration and check it by VERL's rules; without a GPU or a cluster, expect a refusal."""
    assert ("vllm", ranks) == (settings.rollout, settings.ranks)
    if not settings.ray_init:
        with pytest.raises(ConfigError, match="needs GPUs, and this machine has none"):
            check_machine(settings, has_gpu=False)
    options: dict[str, Any] = {"model": "m", "folder": Path("f"), "steps": 3, "tasks": 32}
    whole = compose(settings, **options, checkpoint=None, threads=0)
    validate_config(whole, use_reference_policy=False, use_critic=False)
    return whole.actor_rollout_ref


def test_the_gpu_file_is_the_cpu_file_with_a_large_model_and_vllm() -> None:
    cpu, gpu = read("calc/verl-ray-cpu.toml"), read("calc/verl-gpu.toml")
    assert [cpu["experiment"][key] for key in SAME] == [gpu["experiment"][key] for key in SAME]
    assert ["calc-lm"] == list(gpu["policy"])
    assert "ray" == cpu["algorithm"][-1]["params"]["engine"]
    whole = check(params(gpu))
    assert {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"} == whole.rollout.engine_kwargs.vllm


@pytest.mark.parametrize(("name", "ranks", "cards"), [("eight-gpus", 8, 2), ("cluster", 16, 4)])
def test_files_for_several_gpus_are_the_experiment_with_larger_models(name: str, ranks: int, cards: int) -> None:
    one, many = read("calc/verl-gpu.toml"), read(f"calc/{name}.toml")
    assert [one["experiment"][key] for key in SAME] == [many["experiment"][key] for key in SAME]
    whole = check(params(many), ranks=ranks)
    assert cards == whole.rollout.tensor_model_parallel_size
    assert (name == "cluster") == whole.actor.fsdp_config.param_offload


def test_the_sql_file_has_the_published_settings() -> None:
    small, gpu = read("sql/experiment.toml"), read("sql/verl-gpu.toml")
    assert [small["experiment"][key] for key in SAME] == [gpu["experiment"][key] for key in SAME]
    assert "write|rewrite" == gpu["algorithm"][0]["agents"]
    read_back = params(gpu)
    settings, whole = read_back.settings, check(read_back)
    assert ("grpo", 32, 4096, 2048) == (
        settings.algorithm.adv_estimator,
        settings.data.train_batch_size,
        settings.data.max_prompt_length,
        settings.data.max_response_length,
    )
    assert (4, 1e-6, True) == (whole.rollout.n, whole.actor.optim.lr, whole.actor.fsdp_config.param_offload)
