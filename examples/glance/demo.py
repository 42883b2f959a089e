"""Train a small vision-language model to read colours, from nothing: `python demo.py [--seed N]`.

Makes the data and the model, runs the experiment, draws the reward curve, checks that the model really looks, and says
what to look at next.
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


def call(*words: str) -> None:
    """Run a program in this folder; ends the demo with its exit status when it fails."""
    status = subprocess.run(words, cwd=HERE, check=False).returncode
    if status:
        sys.exit(status)


def measure_exchanged(runs: str) -> float:
    """Return the mean reward of the trained model on tasks that show the pictures of other tasks."""
    agl = (sys.executable, "-m", "agl")
    call(*agl, "data", "export", "glance-lm", "--format", "model", "--output", "out/trained", "--store", runs)
    call(*agl, "run", "exchanged.toml", "--quiet")
    query = [*agl, "sql", "select avg(reward) from rollouts", "--csv", "--store", "sqlite:///out/exchanged.db"]
    return float(subprocess.run(query, cwd=HERE, check=True, capture_output=True, text=True).stdout.split()[-1])


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
    axes.set(
        xlabel="seconds",
        ylabel="mean reward",
        ylim=(-0.02, 1.02),
        title="Letters read off pictures, from random weights",
    )
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    plt.close(figure)
    return [reward for _, reward in validation]


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    seed = str(options.seed)
    work, runs = HERE / "out", "sqlite:///out/runs.db"
    shutil.rmtree(work, ignore_errors=True)
    call(sys.executable, "make_data.py", "--seed", seed)
    call(sys.executable, "make_model.py", "--seed", seed)
    started = time.monotonic()
    call(sys.executable, "-m", "agl", "run", "experiment.toml", "--set", f"experiment.seed={seed}")
    seconds = time.monotonic() - started
    before, warm, *_, after = draw(work / "glance" / "metrics.jsonl", work / "reward.png")
    call(sys.executable, "-m", "agl", "console", runs, "export", "glance", "--output", "out/report.html")
    chance = measure_exchanged(runs)
    print("\nshare of right letters on tasks never trained on: ", end="")
    print(f"{before:.2f} before, {warm:.2f} after sft, {after:.2f} after grpo, {seconds:.0f} s")
    print(f"with the pictures of another task: {chance:.2f} (guessing is right in one of six)")
    print(f"reward curve: {work / 'reward.png'}")
    print(f"figures and numbers:          {work / 'report.html'}, for a browser")
    print(f"all of it in a browser:       agl console {runs} --open")
    print(f"look at the newest run:       agl show latest --store {runs}")
    print(f"why its calls were trained:   agl why latest --store {runs}")
    print(f"good runs as dialogues:       agl data export --min-reward 1 --output good.jsonl --store {runs}")
    print(f"(in {HERE}; agl is {Path(sys.executable).with_name('agl')})")


if __name__ == "__main__":
    main()
