"""Rollouts that `sdpo` needs beside `grpo` on the calculator and the SQL example, and what it learns from silence.

All runs of a world share one warm-up, in which a model of a million random weights imitates the format, the skill and
how to take feedback, and then mostly or always to give up (`_feedback_calc`, `_feedback_sql`).
`grpo` runs with the example's 64 rollouts per step and with 16, as many as `sdpo` has, which is compared with both; the
first figure is that with the one that needs fewer. The time of a step is that of equally many rollouts.

Run alone: ``python -m benchmarks.bench_feedback --seeds 5``; ``--parts calc silent sql`` and ``--first 2`` choose.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks import _feedback_calc, _feedback_sql
from benchmarks._feedback import GROUP, Curve, World
from benchmarks._harness import Figure, table

PARTS = ("calc", "silent", "sql")
MANY, FEW = 8, 2
"""Tasks per step of `grpo`, with groups of 8: the examples', and those of a comparison with few rollouts per step."""

TOLD, TOLD_GROUP, TOLD_LR = 8, 2, 6e-4
"""Tasks, groups and rate of `sdpo` with as few rollouts: it needs no groups to compare, and bears twice the rate."""

SQL_DIALOGUES = 6720
"""Dialogues that show the skill in the SQL example; here as many more show how to take what one is told."""

NEEDED = ("agl_algo_torch", "agl_gateway", "agl_rewards", "openai")


@dataclass(frozen=True, kw_only=True)
class Warm:
    """The curves of one seed from a low start: `grpo` with many and with few rollouts per step, and `sdpo` with few."""

    many: Curve
    few: Curve
    sdpo: Curve

    @property
    def target(self) -> float:
        """0.9 of `grpo`'s final reward, at least 0.5: one that learned nothing is no yardstick."""
        return max(0.5, 0.9 * self.many.final)

    def share_of(self, *others: Curve) -> float:
        """Rollouts of `sdpo` until the target over those of whichever of the others needed fewest."""
        needed = min(curve.rollouts_until(self.target) for curve in others)
        return self.sdpo.rollouts_until(self.target) / max(GROUP, needed)


def run(*, quick: bool) -> list[Figure]:
    """All rows of the table; none without the packages that train."""
    if not all(map(find_spec, NEEDED)):
        return []
    return figures(range(1 if quick else 5), parts=PARTS)


def figures(seeds: Sequence[int], *, parts: Sequence[str]) -> list[Figure]:
    """Prepare the worlds of the parts, run all seeds and return the figures."""
    found: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if {"calc", "silent"} & set(parts):
            (place / "calc").mkdir()
            starts = _feedback_calc.prepared(place / "calc")
            if "calc" in parts:
                found += needed("calc", [warm(starts.world, starts.low, seed=seed, steps=12) for seed in seeds])
            if "silent" in parts:
                found.append(told([silent(starts.world, starts.mute, seed=seed) for seed in seeds]))
        if "sql" in parts:
            (place / "sql").mkdir()
            world, low = _feedback_sql.prepared(place / "sql", dialogues=2 * SQL_DIALOGUES)
            found += needed("sql", [warm(world, low, seed=seed, steps=24) for seed in seeds])
    return found


def warm(world: World, model: str, *, seed: int, steps: int) -> Warm:
    """Train from a low start; `grpo` with few rollouts per step has twice the steps."""
    many = world.learned("grpo", f"grpo-many-{seed}", seed=seed, model=model, tasks=MANY, steps=steps)
    few = world.learned("grpo", f"grpo-few-{seed}", seed=seed, model=model, tasks=FEW, steps=2 * steps)
    sdpo = world.learned(
        "sdpo", f"sdpo-{seed}", seed=seed, model=model, tasks=TOLD, group=TOLD_GROUP, steps=steps, lr=TOLD_LR
    )
    return Warm(many=many, few=few, sdpo=sdpo)


def needed(name: str, found: Sequence[Warm]) -> list[Figure]:
    """The worst shares of rollouts, and the time of a step."""
    rollouts = f"{name}: sdpo's rollouts to 0.9 of grpo's final reward over grpo's"
    worst, example = f"worst of {len(found)} seeds", f"grpo with {MANY * GROUP} rollouts per step"
    return [
        Figure(
            name=f"{rollouts}, {worst}",
            value=max(each.share_of(each.many, each.few) for each in found),
            unit="x",
            bar=0.5,
            better="lower",
            baseline=1.0,
            baseline_name=f"the better of that and grpo with {FEW * GROUP}",
        ),
        Figure(
            name=f"{rollouts} with the example's settings, {worst}",
            value=max(each.share_of(each.many) for each in found),
            unit="x",
            bar=0.5,
            better="lower",
            baseline=1.0,
            baseline_name=example,
        ),
        Figure(
            name=f"{name}: sdpo's time of a step over grpo's with as many rollouts, median",
            value=statistics.median(each.sdpo.step_s / each.few.step_s for each in found),
            unit="x",
            bar=1.6,
            better="lower",
            baseline=1.0,
            baseline_name="grpo",
        ),
    ]


def silent(world: World, model: str, *, seed: int) -> tuple[Curve, Curve]:
    """Train `grpo` and `sdpo` from a start where nothing succeeds."""
    grpo = world.learned("grpo", f"silent-grpo-{seed}", seed=seed, model=model, tasks=MANY, steps=12)
    sdpo = world.learned("sdpo", f"silent-sdpo-{seed}", seed=seed, model=model, tasks=MANY, steps=12)
    return grpo, sdpo


def told(pairs: Sequence[tuple[Curve, Curve]]) -> Figure:
    """The rewards of both from a silent start."""
    share = min(grpo.silent[0] for grpo, _ in pairs)
    return Figure(
        name=f"sdpo's reward from a silent start, worst of {len(pairs)} seeds",
        value=min(sdpo.final for _, sdpo in pairs),
        unit="reward",
        bar=0.6,
        better="higher",
        baseline=max(grpo.final for grpo, _ in pairs),
        baseline_name=f"grpo, best; silent groups at the start: {share:.0%} or more",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    print(table(figures(range(options.first, options.first + options.seeds), parts=options.parts)))
