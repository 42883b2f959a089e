"""Train the calculator agent with VERL, without a GPU: `python demo_verl.py [--seed N] [--engine inproc|ray]`.

In one process to the end; then with VERL's own trainer on Ray for two steps, continued from their checkpoint for a
third, and the trained model is taken away as a directory of its own.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from itertools import accumulate
from pathlib import Path

HERE = Path(__file__).parent
AGL = (sys.executable, "-m", "agl")
RAY_STORE = ("--store", "sqlite:///out/verl-ray/runs.db")
CONSTANT = "algorithm.verl.params.actor_rollout_ref.actor.optim.lr_scheduler_type=constant"
GOAL = 0.8
STEPS = "algorithm.verl.params.trainer.total_training_steps={}"


def call(*words: str) -> float:
    """Run a program in this folder; returns its seconds, and ends the demo with its exit status when it fails."""
    started = time.monotonic()
    status = subprocess.run(words, cwd=HERE, check=False).returncode
    if status:
        sys.exit(status)
    return time.monotonic() - started


def values(folder: str, name: str) -> list[float]:
    """A number that `verl` logged, by step."""
    (file,) = (HERE / folder).glob("*/metrics.jsonl")
    lines = file.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row["value"] for row in rows if (row["algorithm"], row["name"]) == ("verl", name)]


def run_inproc(seed: str) -> list[str]:
    """The whole experiment in one process; returns what to tell."""
    shutil.rmtree(HERE / "out/verl", ignore_errors=True)
    seconds = call(*AGL, "run", "verl-inproc.toml", "--set", f"experiment.seed={seed}")
    reward = values("out/verl", "reward")
    parts = zip(values("out/verl", "collect_s"), values("out/verl", "update_s"), strict=True)
    spent = list(accumulate(collect + update for collect, update in parts))
    above = next((f"above {GOAL} after {s:.0f} s, " for r, s in zip(reward, spent, strict=True) if r > GOAL), "")
    return [
        f"in one process: sampled reward {reward[0]:.2f} in the first step, {above}{reward[-1]:.2f} in step "
        f"{len(reward)}; {spent[-1]:.0f} s of rollouts and updates, {seconds:.0f} s with the warm start and validation"
    ]


def run_ray(seed: str) -> list[str]:
    """Two steps on Ray, a third in another run, and the export; returns what to tell."""
    shutil.rmtree(HERE / "out/verl-ray", ignore_errors=True)
    common = ("run", "verl-ray-cpu.toml", "--set", f"experiment.seed={seed}", "--set", CONSTANT, "--set")
    first = call(*AGL, *common, STEPS.format(2))
    second = call(*AGL, *common, STEPS.format(3), "--resume")
    export = call(*AGL, "export", "calc-lm", "--format", "model", "--output", "out/verl-ray/model", *RAY_STORE)
    steps = len(values("out/verl-ray", "loss"))
    return [
        f"on Ray: {steps} steps, {first:.0f} s for the warm start and two of them, {second:.0f} s to resume and take "
        f"the third, {export:.0f} s to export, {first + second + export:.0f} s in all",
        f"the model that VERL's trainer made: {HERE / 'out/verl-ray/model'}",
    ]


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("both", "inproc", "ray"), default="both")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    seed = str(options.seed)
    call(sys.executable, "make_data.py", "--out", "out/data", "--seed", seed)
    call(sys.executable, "../make_model.py", "--seed", seed)
    told = run_inproc(seed) if options.engine != "ray" else []
    told += run_ray(seed) if options.engine != "inproc" else []
    print("\n" + "\n".join(told))


if __name__ == "__main__":
    main()
