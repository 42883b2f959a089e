"""The program that measures a GPU runs whole on a CPU, in its small form."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

STAGES = ["training", "quantized", "generation", "calc"]
"""The others need the framework of an example, or a GPU."""


@pytest.mark.long
def test_every_stage_for_a_gpu_runs_in_a_small_form() -> None:
    words = [sys.executable, "-m", "benchmarks.gpu", "--only", *STAGES]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    root = Path(__file__).parents[2]
    ended = subprocess.run(words, cwd=root, env=hidden, check=False, text=True, capture_output=True)
    assert 0 == ended.returncode, ended.stdout + ended.stderr
    assert STAGES == [line.split(":")[0][1:] for line in ended.stdout.splitlines() if line.startswith("[")]
