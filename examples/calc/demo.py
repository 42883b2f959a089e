"""Train a small model to use a calculator, from nothing: `python demo.py [--seed N]`.

Makes the data and the model, runs `experiment.toml`, draws the reward curve, and says what to look at next.
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


def read_metrics(path: Path, *, algorithm: str, name: str) -> list[tuple[float, float]]:
    """Return (time, value) of one metric, in order."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(r["time"], r["value"]) for r in rows if (r["algorithm"], r["name"]) == (algorithm, name)]


def draw(metrics: Path, target: Path) -> tuple[float, float]:
    """Draw the reward over time; returns validation reward at the start and at the end."""
    validation = read_metrics(metrics, algorithm="validate", name="reward")
    training = read_metrics(metrics, algorithm="grpo", name="reward")
    warm = read_metrics(metrics, algorithm="sft", name="loss")
    start = validation[0][0]
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.axvspan(0, warm[-1][0] - start, color="0.92", label="sft")
    for name, points, style in (("grpo, training", training, ".-"), ("validation", validation, "o-")):
        axes.plot([t - start for t, _ in points], [v for _, v in points], style, label=name)
    axes.set(
        xlabel="seconds", ylabel="mean reward", ylim=(-0.02, 1.02), title="A calculator agent, from random weights"
    )
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    plt.close(figure)
    return validation[0][1], validation[-1][1]


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    shutil.rmtree(WORK, ignore_errors=True)
    call(sys.executable, "make_data.py", "--seed", str(seed))
    call(sys.executable, "make_model.py", "--seed", str(seed))
    started = time.monotonic()
    call(sys.executable, "-m", "agl", "run", "experiment.toml", "--set", f"experiment.seed={seed}")
    seconds = time.monotonic() - started
    before, after = draw(WORK / "run" / "metrics.jsonl", WORK / "reward.png")
    print(f"\nvalidation reward on tasks never trained on: {before:.2f} before, {after:.2f} after, {seconds:.0f} s")
    print(f"reward curve: {WORK / 'reward.png'}")
    print("look at the newest run:       agl show latest --store sqlite:///out/runs.db")
    print("why its calls were trained:   agl why latest --store sqlite:///out/runs.db")
    print("good runs as dialogues:       agl export --min-reward 1 --output good.jsonl --store sqlite:///out/runs.db")
    print(f"(in {HERE})")


if __name__ == "__main__":
    main()
