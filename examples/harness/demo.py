"""Train a small model to repair code in pi, from nothing: `python demo.py [--seed N]`. It needs Node.js.

Installs pi where it is missing, makes the workspaces and the model, runs the experiment, draws the reward curve, and
says what to look at next.
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
    status = subprocess.run([sys.executable, *words], cwd=HERE, check=False).returncode
    if status:
        sys.exit(status)


def read_metrics(path: Path, *, algorithm: str, name: str) -> list[tuple[float, float]]:
    """Return (time, value) of one metric, in order."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(r["time"], r["value"]) for r in rows if (r["algorithm"], r["name"]) == (algorithm, name)]


def draw(metrics: Path, target: Path) -> list[float]:
    """Draw the reward over time; returns the validation rewards, in order."""
    validation = read_metrics(metrics, algorithm="validate", name="reward")
    training = read_metrics(metrics, algorithm="grpo", name="reward")
    warm = read_metrics(metrics, algorithm="sft", name="loss")
    start = validation[0][0]
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.axvspan(0, warm[-1][0] - start, color="0.92", label="sft")
    for name, points, style in (("grpo, training", training, ".-"), ("validation", validation, "o-")):
        axes.plot([t - start for t, _ in points], [v for _, v in points], style, label=name)
    axes.set(xlabel="seconds", ylabel="share of hidden tests passed", ylim=(-0.02, 1.02), title="pi, from nothing")
    axes.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(target, dpi=100)
    plt.close(figure)
    return [reward for _, reward in validation]


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    seed = str(parser.parse_args().seed)
    shutil.rmtree(WORK, ignore_errors=True)
    call("-m", "agl", "harness", "install", "pi")
    call("make_data.py", "--seed", seed)
    call("../make_model.py", "--seed", seed)
    started = time.monotonic()
    call("-m", "agl", "run", "experiment.toml", "--set", f"experiment.seed={seed}")
    seconds = time.monotonic() - started
    before, warm, *_, after = draw(WORK / "harness" / "metrics.jsonl", WORK / "reward.png")
    print("\nshare of hidden tests that pass, in modules never trained on: ", end="")
    print(f"{before:.2f} before, {warm:.2f} after sft, {after:.2f} after grpo, {seconds:.0f} s")
    print(f"reward curve: {WORK / 'reward.png'}")
    print("look at the newest run:       agl show latest --store sqlite:///out/runs.db")
    print("why its calls were trained:   agl why latest --store sqlite:///out/runs.db")
    print(f"(in {HERE})")


if __name__ == "__main__":
    main()
