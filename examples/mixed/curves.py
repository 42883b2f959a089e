"""The example's results: read from the runs' records, printed as a table, drawn as curves."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from agl import Reward, Rollout
from agl.contracts import RolloutQuery
from agl_store_sqlite import SQLiteStore

COLOURS = {"mixed": "tab:green", "grpo-only": "tab:blue", "apo-only": "tab:orange"}
PARTS = ("facts", "style")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One validation: the mean reward and its parts after so many rollouts that algorithms paid for.

    `style` is about the entries whose facts were right, and `nan` where there are none.
    """

    rollouts: int
    reward: float
    facts: float
    style: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One run: which experiment, its seed, its validations in order, and what it took, by the clock and of CPU."""

    arm: str
    seed: int
    points: list[Point]
    seconds: float
    cpu: float


def read_points(database: Path, arm: str) -> list[Point]:
    """Return the validations of an experiment, in order."""
    return asyncio.run(_read_points(database, arm))


async def _read_points(database: Path, arm: str) -> list[Point]:
    store = SQLiteStore(f"sqlite:///{database}")
    paid: list[float] = []
    validations: dict[int, list[Rollout]] = defaultdict(list)
    for rollout in await store.rollouts(RolloutQuery(experiment=arm, limit=100_000)):
        if rollout.metadata["algorithm"] == "validate":
            validations[rollout.metadata["step"]].append(rollout)
        else:
            paid.append(rollout.created_at)
    points: list[Point] = []
    for _, rollouts in sorted(validations.items()):
        spans = [span for rollout in rollouts for span in await store.spans(rollout.rollout_id)]
        start = min(rollout.created_at for rollout in rollouts)
        rewards = [span.reward for span in spans if span.reward]
        points.append(_point(rewards, count=len(rollouts), paid=sum(moment < start for moment in paid)))
    await store.close()
    return points


def _point(rewards: Sequence[Reward], *, count: int, paid: int) -> Point:
    parts = {name: [r.dimensions[name] for r in rewards if r.dimensions.get(name) is not None] for name in PARTS}
    means = {name: fmean(values) if values else math.nan for name, values in parts.items()}
    return Point(rollouts=paid, reward=sum(r.value or 0.0 for r in rewards) / count, **means)


def draw(curves: Sequence[Curve], target: Path) -> None:
    """Draw the reward over the rollouts that were paid: every run thin, with several seeds also their mean."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for arm, colour in COLOURS.items():
        runs = [curve.points for curve in curves if curve.arm == arm]
        for points in runs:
            axes.plot(
                [p.rollouts for p in points], [p.reward for p in points], ".-", color=colour, alpha=0.35, linewidth=1
            )
        if runs:
            length = min(map(len, runs))
            places = [[points[k] for points in runs] for k in [*range(length - 1), -1]]
            axes.plot(
                [fmean(p.rollouts for p in place) for place in places],
                [fmean(p.reward for p in place) for place in places],
                color=colour,
                linewidth=2.5,
                label=arm,
            )
    axes.set(xlabel="rollouts", ylabel="validation reward", ylim=(-0.02, 1.02), title="A writer and a checker")
    axes.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(target, dpi=80)
    plt.close(figure)


def table(curves: Sequence[Curve]) -> str:
    """Return the ends of all runs as a Markdown table."""
    head = "| Experiment | Seed | Rollouts | Facts | Style | **Reward** | Seconds | CPU seconds |"
    rows = [
        f"| {c.arm} | {c.seed} | {end.rollouts} | {end.facts:.2f} | {end.style:.2f} | **{end.reward:.2f}** "
        f"| {c.seconds:.0f} | {c.cpu:.0f} |"
        for c in curves
        for end in c.points[-1:]
    ]
    return "\n".join([head, "|---" * 8 + "|", *rows])


def comparison(curves: Sequence[Curve]) -> str:
    """Return what each experiment reached, and by how much `mixed` is ahead of the better of the others."""
    ends = {arm: [c.points[-1].reward for c in curves if c.arm == arm] for arm in COLOURS}
    lines = [f"{arm}: {fmean(values):.3f}, from {min(values):.3f} to {max(values):.3f}" for arm, values in ends.items()]
    better = max(("grpo-only", "apo-only"), key=lambda arm: fmean(ends[arm]))
    ahead = 100 * (fmean(ends["mixed"]) - fmean(ends[better]))
    return "\n".join([*lines, f"mixed is {ahead:.1f} points above {better}"])
