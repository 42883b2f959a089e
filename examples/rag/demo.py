"""Train a small model to search twice, from nothing: `python demo.py [--seed N ...]`.

Makes the wiki and the model, runs `experiment.toml`, draws the curves, and says what to look at next. With several
seeds all of it is done for each, one after the other; what was recorded stays of the last one.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from agl.contracts import RolloutQuery
from agl_store_sqlite import SQLiteStore

HERE = Path(__file__).parent
WORK = HERE / "out"
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One validation, after so many steps of both algorithms: the reward and its parts, averaged over the questions."""

    step: int
    reward: float
    exact: float
    form: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One seed's validations, the last step of the warm-up, and what all of it took, by the clock and of CPU."""

    seed: int
    points: list[Point]
    warm: int
    seconds: float
    cpu: float


def call(*words: str) -> None:
    """Run a program in this folder; ends the demo with its exit status when it fails."""
    status = subprocess.run([sys.executable, *words], cwd=HERE, check=False).returncode
    if status:
        sys.exit(status)


async def read_parts(database: Path) -> dict[int, dict[str, float]]:
    """Return the mean of every part of the reward, by the step after which it was validated."""
    store = SQLiteStore(f"sqlite:///{database}")
    found: dict[int, list[dict[str, float]]] = defaultdict(list)
    for rollout in await store.rollouts(RolloutQuery(mode="val", limit=100_000)):
        rewards = [span.reward for span in await store.spans(rollout.rollout_id) if span.reward]
        found[rollout.metadata["step"]].append(dict(rewards[-1].dimensions) if rewards else {})
    await store.close()
    return {
        step: {part: sum(row.get(part) or 0.0 for row in rows) / len(rows) for part in ("exact", "form")}
        for step, rows in found.items()
    }


def read_curve(work: Path) -> tuple[list[Point], int]:
    """Return a run's validations, and the last step of its warm-up."""
    rows = [json.loads(line) for line in (work / "rag" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    parts = asyncio.run(read_parts(work / "runs.db"))
    validated = [row for row in rows if (row["algorithm"], row["name"]) == ("validate", "reward")]
    points = [Point(step=row["step"], reward=row["value"], **parts[row["step"]]) for row in validated]
    return points, max(row["step"] for row in rows if row["algorithm"] == "sft")


def train(seed: int) -> Curve:
    """Do all of it for one seed."""
    shutil.rmtree(WORK, ignore_errors=True)
    started, before = time.monotonic(), os.times()
    call("make_data.py", "--seed", str(seed))
    call("../make_model.py", "--seed", str(seed))
    call("-m", "agl", "run", "experiment.toml", "--set", f"experiment.seed={seed}")
    seconds, after = time.monotonic() - started, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    points, warm = read_curve(WORK)
    return Curve(seed=seed, points=points, warm=warm, seconds=seconds, cpu=cpu)


def draw(curves: list[Curve], target: Path) -> None:
    """Draw every seed's validations, exact answers and, dashed, their form."""
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.axvspan(0, max(curve.warm for curve in curves), color="0.92", label="sft")
    for curve, colour in zip(curves, COLOURS, strict=False):
        steps = [point.step for point in curve.points]
        exact, form = [p.exact for p in curve.points], [p.form for p in curve.points]
        axes.plot(steps, exact, "o-", color=colour, label=f"exact match, seed {curve.seed}")
        axes.plot(steps, form, "--", color=colour, alpha=0.4, label=f"form, seed {curve.seed}")
    axes.axhline(0.23, color="0.6", linewidth=0.8, linestyle=":")
    axes.set(xlabel="step", ylabel="share of held-out questions", ylim=(-0.02, 1.02), title="Two hops, from nothing")
    axes.legend(loc="lower right", fontsize="small")
    figure.tight_layout()
    figure.savefig(target, dpi=80)
    plt.close(figure)


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="up to four")
    curves = [train(seed) for seed in parser.parse_args().seed]
    draw(curves, WORK / "curves.png")
    print("\nheld-out questions answered:")
    for curve in curves:
        before, warm, *_, after = curve.points
        print(
            f"  seed {curve.seed}: {before.exact:.2f} at first, {warm.exact:.2f} after sft, {after.exact:.2f} after "
            f"grpo (reward {before.reward:.2f}, {warm.reward:.2f}, {after.reward:.2f}); "
            f"{curve.seconds:.0f} s, {curve.cpu:.0f} s of CPU"
        )
    print(f"curves: {WORK / 'curves.png'}")
    print("look at the newest run:       agl show latest --store sqlite:///out/runs.db")
    print("why its calls were trained:   agl why latest --store sqlite:///out/runs.db")
    print(f"(in {HERE})")


if __name__ == "__main__":
    main()
