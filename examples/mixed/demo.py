"""Train a writer's weights and a checker's prompt in turns: `python demo.py [--compare] [--seeds N ...]`.

Makes the letters and the model, starts the scripted models, runs `mixed.toml`, draws the curve, and says what to look
at next. With `--compare` it also runs `grpo-only.toml` and `apo-only.toml`, which start where the warm-up ended and
pay for as many rollouts. With several seeds all of it is done for each, one after the other; what was recorded stays
of the last one.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import curves
import scripted

HERE = Path(__file__).parent
WORK = HERE / "out"


def call(*words: str) -> None:
    """Run a program in this folder; ends the demo with its exit status when it fails."""
    status = subprocess.run([sys.executable, *words], cwd=HERE, check=False).returncode
    if status:
        sys.exit(status)


def train(arm: str, *, seed: int) -> curves.Curve:
    """Run one experiment."""
    started, before = time.monotonic(), os.times()
    with scripted.server(seed=seed) as server:
        settings = [f"experiment.seed={seed}", f'policy.checker.base_url="{server.base_url}"']
        if arm != "grpo-only":
            settings.append(f'algorithm.apo.params.optimizer.base_url="{server.base_url}"')
        call("-m", "agl", "run", f"{arm}.toml", *(word for setting in settings for word in ("--set", setting)))
    seconds, after = time.monotonic() - started, os.times()
    points = curves.read_points(WORK / "runs.db", arm)
    return curves.Curve(arm=arm, seed=seed, points=points, seconds=seconds, cpu=sum(after[:4]) - sum(before[:4]))


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action="store_true", help="run grpo-only.toml and apo-only.toml, too")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    found: list[curves.Curve] = []
    for seed in options.seeds:
        shutil.rmtree(WORK, ignore_errors=True)
        call("make_data.py", "--seed", str(seed))
        call("../make_model.py", "--seed", str(seed))
        for arm in curves.COLOURS if options.compare else ("mixed",):
            found.append(train(arm, seed=seed))
        curves.draw(found, WORK / "curves.png")
        print(f"\n{curves.table(found)}\n", flush=True)
    if options.compare:
        print(curves.comparison(found))
    best = next(WORK.glob("mixed/run-*/apo/best/checker_prompt.txt"))
    print(f"The checker's prompt, from {best.relative_to(HERE)}:\n\n{best.read_text(encoding='utf-8')}\n")
    print(f"curves: {WORK / 'curves.png'}")
    print("look at the newest run:       agl show latest --store sqlite:///out/runs.db")
    print("why its calls were trained:   agl why latest --store sqlite:///out/runs.db")
    print(f"(in {HERE})")


if __name__ == "__main__":
    main()
