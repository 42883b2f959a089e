"""Teach a crew to delegate, from random weights: `python demo.py [--seed N]`.

Makes the data and the model, runs the experiment, draws the reward curve, and says what to look at next.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
WORK = HERE / "out"


def call(*words: str) -> None:
    """Run a program in this folder; ends the demo with its exit status when it fails."""
    status = subprocess.run(words, cwd=HERE, check=False).returncode
    if status:
        sys.exit(status)


def read_rewards(path: Path, *, algorithm: str) -> list[tuple[float, float]]:
    """Return (time, reward), in order."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(r["time"], r["value"]) for r in rows if (r["algorithm"], r["name"]) == (algorithm, "reward")]


def draw(metrics: Path, target: Path) -> list[float]:
    """Draw the reward over time; returns the validation rewards, in order."""
    validation = read_rewards(metrics, algorithm="validate")
    start = validation[0][0]
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, points, style in (
        ("grpo, training", read_rewards(metrics, algorithm="grpo"), ".-"),
        ("validation", validation, "o-"),
    ):
        axes.plot([t - start for t, _ in points], [reward for _, reward in points], style, label=name)
    axes.set(xlabel="seconds", ylabel="mean reward", ylim=(-0.02, 1.02), title="A crew learns to delegate")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    plt.close(figure)
    return [reward for _, reward in validation]


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed = str(parser.parse_args().seed)
    shutil.rmtree(WORK, ignore_errors=True)
    call(sys.executable, "make_data.py", "--seed", seed)
    call(sys.executable, "../make_model.py", "--seed", seed)
    started = time.monotonic()
    call(sys.executable, "-m", "agl", "run", "experiment.toml", "--set", f"experiment.seed={seed}")
    seconds = time.monotonic() - started
    before, warm, *_, after = draw(WORK / "crew" / "metrics.jsonl", WORK / "reward.png")
    print("\nvalidation reward on parts never trained on: ", end="")
    print(f"{before:.2f} before, {warm:.2f} after sft, {after:.2f} after grpo, {seconds:.0f} s")
    print(f"reward curve: {WORK / 'reward.png'}")
    print("look at the newest run:       agl show latest --store sqlite:///out/runs.db")
    print("why its calls were trained:   agl why latest --store sqlite:///out/runs.db")
    print(f"(in {HERE})")


if __name__ == "__main__":
    main()
