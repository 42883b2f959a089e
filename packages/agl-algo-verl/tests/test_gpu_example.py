"""The example for a GPU is read as a whole here, for no test runs it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from agl.errors import ConfigError
from agl_algo_verl.ray_keys import check_machine, read_ray_settings

CALC = Path(__file__).parents[3] / "examples" / "calc"


def test_the_gpu_file_is_the_cpu_file_with_a_large_model_and_vllm() -> None:
    cpu, gpu = (tomllib.loads((CALC / name).read_text()) for name in ("verl-ray-cpu.toml", "verl-gpu.toml"))
    same = ("agent", "train", "val", "hidden")
    assert [cpu["experiment"][key] for key in same] == [gpu["experiment"][key] for key in same]
    assert ["calc-lm"] == list(gpu["policy"])
    assert {"ray"} == {content["algorithm"][-1]["params"].pop("engine") for content in (cpu, gpu)}
    settings = read_ray_settings(gpu["algorithm"][-1]["params"])
    assert ("vllm", 1) == (settings.rollout, settings.ranks)
    with pytest.raises(ConfigError, match="needs GPUs, and this machine has none"):
        check_machine(settings, has_gpu=False)
