"""Train a team of two from random weights: `python demo.py [--seed N] [--compare]`.

Makes the data and a model, teaches the model both parts (`warmup.toml`), trains an adapter for each agent
(`experiment.toml`) and draws a curve for each. `--compare` then trains only one of the two, from the same start
(`alone.toml`).
"""

import argparse
import asyncio
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from agl.contracts import RolloutQuery
from agl_store_sqlite import SQLiteStore

HERE = Path(__file__).parent
WORK = HERE / "out"
AGENTS = ("guide", "picker")

Curves = dict[int, dict[str, float]]
"""Means over the validation orders, by the step after which they were validated."""


def call(*words: str) -> None:
    """Run a program in this folder; ends the demo with its exit status when it fails."""
    status = subprocess.run(words, cwd=HERE, check=False).returncode
    if status:
        sys.exit(status)


def train(file: str, name: str, seed: int, *settings: str) -> None:
    """Run an experiment under a name."""
    values = (f"experiment.name={name}", f"experiment.seed={seed}", *settings)
    call(sys.executable, "-m", "agl", "run", file, *(word for value in values for word in ("--set", value)))


async def read_curves(database: Path, name: str) -> Curves:
    """Return the team's reward and each agent's part of it, from the records of an experiment."""
    store = SQLiteStore(f"sqlite:///{database}")
    found: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for rollout in await store.rollouts(RolloutQuery(experiment=name, mode="val", limit=100_000)):
        (reward,) = [span.reward for span in await store.spans(rollout.rollout_id) if span.reward]
        for part, value in {"team": reward.value, **reward.dimensions}.items():
            found[rollout.metadata["step"]][part].append(value or 0.0)
    await store.close()
    return {step: {part: fmean(values) for part, values in parts.items()} for step, parts in sorted(found.items())}


def draw(curves: dict[str, Curves], target: Path) -> None:
    """Draw the agents' curves and the team's, with a panel for each experiment."""
    figure, panels = plt.subplots(1, len(curves), figsize=(1 + 4 * len(curves), 4), sharey=True, squeeze=False)
    for axes, (name, curve) in zip(panels[0], curves.items(), strict=True):
        for part in (*AGENTS, "team"):
            style = "o-" if part == "team" else ".--"
            axes.plot(list(curve), [means[part] for means in curve.values()], style, label=part)
        axes.set(xlabel="steps of grpo", title=name, ylim=(-0.02, 1.02))
    panels[0][0].set_ylabel("mean over the validation orders")
    panels[0][-1].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(target, dpi=100)
    plt.close(figure)


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", action="store_true", help="also train each agent alone")
    options = parser.parse_args()
    shutil.rmtree(WORK, ignore_errors=True)
    started = time.monotonic()
    call(sys.executable, "make_data.py", "--seed", str(options.seed))
    call(sys.executable, "../make_model.py", "--seed", str(options.seed))
    train("warmup.toml", "warmup", options.seed)
    train("experiment.toml", "team", options.seed)
    seconds = time.monotonic() - started
    alone = {f"{agent}-only": agent for agent in AGENTS if options.compare}
    for name, agent in alone.items():
        train("alone.toml", name, options.seed, f"algorithm.grpo.tunes={agent}")
    curves = {name: asyncio.run(read_curves(WORK / "runs.db", name)) for name in ("team", *alone)}
    draw(curves, WORK / "curves.png")
    for name, curve in curves.items():
        for step, means in curve.items():
            print(f"{name} after step {step}: " + ", ".join(f"{part} {mean:.2f}" for part, mean in means.items()))
    print(f"\ncurves: {WORK / 'curves.png'}; {seconds:.0f} s for the team")
    print("look at the newest run:       agl show latest --store sqlite:///out/runs.db")
    print("why its calls were trained:   agl why latest --store sqlite:///out/runs.db")
    print(f"(in {HERE})")


if __name__ == "__main__":
    main()
