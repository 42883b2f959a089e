"""The parts of ``benchmarks.gpu`` that are programs of their own: tests, measures of the trainer, and two examples."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks._harness import Figure

ROOT = Path(__file__).parents[1]
WIDTH, HEADS, STEPS = 2304, 18, 12
"""Two layers of this width have 0.12 billion weights."""


def call(*words: str, folder: Path) -> str:
    """Run a program and return what it printed; raises RuntimeError with the end of it when it fails."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = os.environ | {"TOKENIZERS_PARALLELISM": "0", "PYTHONPATH": paths}
    ended = subprocess.run(words, cwd=folder, check=False, text=True, env=variables, capture_output=True, timeout=300)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(words)}: {(ended.stdout + ended.stderr)[-3000:]}")
    return ended.stdout


def marked_tests(options: argparse.Namespace, model: Path, folder: Path) -> list[Figure]:
    """Run the tests marked ``gpu``, of which vLLM's skip themselves without vLLM; raises if one fails."""
    found = (path for package in ("torch", "vllm") for path in ROOT.glob(f"packages/agl-*{package}/tests/test_*.py"))
    tests = [str(path) for path in found if "mark.gpu" in path.read_text(encoding="utf-8")]  # others need more packages
    print(
        call(sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *tests, folder=ROOT)[-2000:]
    )
    return []


def measured(stage: str) -> Callable[[argparse.Namespace, Path, Path], list[Figure]]:
    """Return the stage that measures the trainer from inside, next to its tests."""
    program = ROOT / "packages" / "agl-algo-torch" / "tests" / "gpu_measures.py"

    def run(options: argparse.Namespace, model: Path, folder: Path) -> list[Figure]:
        print(call(sys.executable, str(program), stage, str(model), str(folder), folder=ROOT))
        return []

    return run


def calc(options: argparse.Namespace, model: Path, folder: Path) -> list[Figure]:
    """Train the calculator example."""
    changes = {
        "algorithm.sft.params.optim.lr": 3e-4,
        "algorithm.grpo.params.optim.lr": 1e-5,
        "algorithm.grpo.params.steps": STEPS,
    }
    small = {"algorithm.sft.params.updates_per_step": 2, "algorithm.sft.params.updates": 4}
    return example(
        options, folder, "calc", policies=["calc-lm"], algorithms=["sft", "grpo"], changes=changes, small=small
    )


def sql(options: argparse.Namespace, model: Path, folder: Path) -> list[Figure]:
    """Train the SQL example, its checker too."""
    changes = {
        "algorithm.sft-check.params.optim.lr": 3e-4,
        "algorithm.sft-write.params.optim.lr": 3e-4,
        "algorithm.grpo.params.optim.lr": 1e-5,
        "algorithm.grpo.params.steps": STEPS,
    }
    small = {
        f"algorithm.sft-{part}.params.{name}": value
        for part in ("check", "write")
        for name, value in (("updates_per_step", 2), ("updates", 4))
    }
    algorithms = ["sft-check", "sft-write", "grpo"]
    return example(
        options, folder, "sql", policies=["main_llm", "check_llm"], algorithms=algorithms, changes=changes, small=small
    )


def example(
    options: argparse.Namespace,
    folder: Path,
    name: str,
    *,
    policies: list[str],
    algorithms: list[str],
    changes: dict[str, object],
    small: dict[str, object],
) -> list[Figure]:
    """Make an example's data and model, and train it; the small form trains a few steps of the example's own model."""
    shutil.copytree(ROOT / "examples" / name, folder / name, ignore=shutil.ignore_patterns("out", "*.png"))
    shutil.copy(ROOT / "examples" / "make_model.py", folder)
    here = folder / name
    dtype, device = ("float32", "cpu") if options.is_small else ("bfloat16", "cuda")
    for policy in policies:
        changes |= {f"policy.{policy}.device": device, f"policy.{policy}.dtype": dtype}
    for algorithm in algorithms:
        changes |= {
            f"algorithm.{algorithm}.params.compute.{key}": v for key, v in (("device", device), ("dtype", dtype))
        }
    if options.is_small:
        changes |= small | {"algorithm.grpo.params.steps": 2, "experiment.validation_limit": 4}
    else:
        widen(here / "model.toml")
    call(sys.executable, "make_data.py", folder=here)
    print(call(sys.executable, "../make_model.py", folder=here).strip())
    sets = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    call(sys.executable, "-m", "agl", "run", "experiment.toml", *sets, folder=here)
    return figures(name, here / "out" / name / "metrics.jsonl")


def widen(spec: Path) -> None:
    """Give the models of an example the width and heads for a GPU."""
    lines = [line for line in spec.read_text(encoding="utf-8").splitlines() if not line.startswith(("models", "heads"))]
    names = ["model"] if "calc" in spec.parts else ["writer", "checker"]
    widths = ", ".join(f"{name} = {WIDTH}" for name in names)
    spec.write_text("\n".join([*lines, f"heads = {HEADS}", f"models = {{ {widths} }}", ""]), encoding="utf-8")


def figures(name: str, metrics: Path) -> list[Figure]:
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]

    def of(algorithm: str, metric: str) -> list[float]:
        return [row["value"] for row in rows if (row["algorithm"], row["name"]) == (algorithm, metric)]

    rewards = of("validate", "reward")
    print(f"{name}: validation rewards {', '.join(f'{reward:.2f}' for reward in rewards)}")
    updates, collects = of("grpo", "update_s"), of("grpo", "collect_s")
    wall, trained = sum(updates) + sum(collects), of("grpo", "tokens")
    return [
        Figure(name=f"{name}: validation reward after grpo", value=rewards[-1], unit="", better="higher"),
        Figure(name=f"{name}: seconds of a step of grpo", value=wall / len(updates), unit="s", better="lower"),
        Figure(name=f"{name}: share of updates in a step", value=sum(updates) / wall, unit="", better="higher"),
        Figure(name=f"{name}: trained tokens per step", value=sum(trained) / len(updates), unit="", better="higher"),
    ]
