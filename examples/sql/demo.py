"""Train a small model to write SQL, from nothing: `python demo.py [--seed N]`.

Makes the databases and the models, runs `experiment.toml`, draws the curves, and says what to look at next.
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from agl.contracts import RolloutQuery
from agl_store_sqlite import SQLiteStore

HERE = Path(__file__).parent
WORK = HERE / "out"
PARTS = ("syntax", "execution", "goal")


def call(*words: str) -> None:
    """Run a program in this folder; ends the demo with its exit status when it fails."""
    status = subprocess.run(words, cwd=HERE, check=False).returncode
    if status:
        sys.exit(status)


async def read_parts(database: Path) -> dict[int, dict[str, float]]:
    """Return the mean of every part of the reward, by the step after which it was validated."""
    store = SQLiteStore(f"sqlite:///{database}")
    found: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for rollout in await store.rollouts(RolloutQuery(mode="val", limit=100_000)):
        rewards = [span.reward for span in await store.spans(rollout.rollout_id) if span.reward]
        for part in PARTS:
            values = [reward.dimensions[part] for reward in rewards if part in reward.dimensions]
            found[rollout.metadata["step"]][part].append(values[-1] if values else 0.0)
    await store.close()
    return {step: {part: sum(v) / len(v) for part, v in parts.items()} for step, parts in sorted(found.items())}


def read_times(path: Path) -> tuple[dict[int, float], float]:
    """Return when each validation was done and when `grpo` began, in seconds after the first validation."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    done = {r["step"]: r["time"] for r in rows if (r["algorithm"], r["name"]) == ("validate", "reward")}
    taught = max(r["time"] for r in rows if r["algorithm"] == "sft-write")
    start = min(done.values())
    return {step: moment - start for step, moment in done.items()}, taught - start


def draw(parts: dict[int, dict[str, float]], metrics: Path, target: Path) -> None:
    """Draw the parts of the reward over time."""
    times, taught = read_times(metrics)
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.axvspan(0, taught, color="0.92", label="sft")
    for part in PARTS:
        axes.plot([times[step] for step in parts], [values[part] for values in parts.values()], "o-", label=part)
    axes.set(
        xlabel="seconds", ylabel="mean over the validation tasks", ylim=(-0.02, 1.02), title="A SQL agent, from nothing"
    )
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(target, dpi=100)
    plt.close(figure)


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    shutil.rmtree(WORK, ignore_errors=True)
    started = time.monotonic()
    call(sys.executable, "make_data.py", "--seed", str(seed))
    call(sys.executable, "../make_model.py", "--seed", str(seed))
    call(sys.executable, "-m", "agl", "run", "experiment.toml", "--set", f"experiment.seed={seed}")
    seconds = time.monotonic() - started
    parts = asyncio.run(read_parts(WORK / "runs.db"))
    draw(parts, WORK / "sql" / "metrics.jsonl", WORK / "reward.png")
    for step, values in parts.items():
        print(f"after step {step}: " + ", ".join(f"{part} {value:.2f}" for part, value in values.items()))
    print(f"\ncurves: {WORK / 'reward.png'}; {seconds:.0f} s in all")
    print("look at the newest run:       agl show latest --store sqlite:///out/runs.db")
    print('which of its calls train:      agl why latest --agents "write|rewrite" --store sqlite:///out/runs.db')
    print(f"(in {HERE})")


if __name__ == "__main__":
    main()
