"""Kuhn poker: exact exploitability of two agents that learn against each other.

Every run is a whole experiment of two agents with opposite rewards: agent, runner, store, versions, schedule and
estimator are real, and each agent's policy is a table, because a network of `grpo` takes ten times the CPU. A step has
groups of 8 games for each of the six deals. Measured is the player who draws one version of the second half of the run
for a whole game.

The other arms differ from the first in one setting; the control has two: it divides by the group's deviation, as `grpo`
does, and has no entropy bonus. In turns, each agent learns from games of its own, so that there are twice as many.
Run alone, it also writes the curves of the documentation: ``python -m benchmarks.bench_kuhn``; it needs agl-objectives
and torch.
"""

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import agl
from agl import PluginManager
from agl.algorithms import algorithm
from agl_run import Quiet
from agl_store_sqlite import SQLiteStore
from benchmarks._harness import Figure, table
from worlds.kuhn import VALUE, Plan, Policy, exploitability, mixture, value

STEPS, SEEDS, OTHERS = 200, 5, 3
"""Steps of a run, and the number of seeds of the first two arms and of each of the others."""

EACH = 5
"""Steps between two points of a curve."""

CURVES = Path(__file__).with_name("kuhn.json")
"""The curves that ``python -m tools.figures`` draws."""

FIRST, CONTROL = "bonus, no division", "control: division, no bonus"
ARMS: dict[str, dict[str, Any]] = {
    FIRST: {},
    CONTROL: {"entropy": 0.0, "estimator": "grpo"},
    "no bonus": {"entropy": 0.0},
    "division": {"estimator": "grpo"},
    "in turns": {"in_turns": True},
    "in turns, against the last 20": {"in_turns": True, "league": 20},
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One experiment: both players' policies after each step, and seconds of CPU."""

    firsts: list[Policy]
    seconds: list[Policy]
    cpu_s: float

    def mixed(self, step: int) -> tuple[Plan, Policy]:
        """Return the players who draw one of the second half of the versions until a step, for a whole game."""
        return mixture(self.firsts[step // 2 : step], self.seconds[step // 2 : step])

    @property
    def end(self) -> tuple[Plan, Policy]:
        """The mixture of the whole run."""
        return self.mixed(len(self.firsts))


def run(*, quick: bool) -> list[Figure]:
    """All rows of the table; none where torch is not installed."""
    if not find_spec("agl_objectives") or not find_spec("torch"):
        return []
    return figures(measure(steps=10, seeds=1, others=1) if quick else measure(steps=STEPS, seeds=SEEDS, others=OTHERS))


def figures(runs: Mapping[str, Sequence[Run]]) -> list[Figure]:
    """Return one row per arm, and the value and the time of the first."""
    away = [abs(value(*one.end) - VALUE) for one in runs[FIRST]]
    return [
        row(f"exploitability, {FIRST}", [exploitability(*one.end) for one in runs[FIRST]], bar=0.08),
        row(f"exploitability, {CONTROL}", [exploitability(*one.end) for one in runs[CONTROL]], bar=0.14, rises=True),
        row("distance of the value from -1/18", away, bar=0.03),
        row("CPU of a run", [one.cpu_s for one in runs[FIRST]], unit="s"),
        *(row(f"exploitability, {name}", [exploitability(*one.end) for one in runs[name]]) for name in list(ARMS)[2:]),
    ]


def row(
    name: str, values: Sequence[float], *, bar: float | None = None, unit: str = "chips", rises: bool = False
) -> Figure:
    """Return the mean over seeds; with a bar, which one seed may miss, the worst value but one."""
    worst = sorted(values, reverse=not rises)
    return Figure(
        name=f"{name} ({', '.join(f'{one:.3f}' for one in values)})",
        value=statistics.fmean(values) if bar is None else worst[min(1, len(worst) - 1)],
        unit=unit,
        bar=bar,
        better="higher" if rises else "lower",
    )


def curves(runs: Mapping[str, Sequence[Run]]) -> dict[str, list[tuple[int, float]]]:
    """Return the exploitability of each arm's mixture by steps, as the mean over seeds."""
    return {
        name: [
            (step, round(statistics.fmean(exploitability(*one.mixed(step)) for one in arm), 4))
            for step in range(EACH, len(arm[0].firsts) + 1, EACH)
        ]
        for name, arm in runs.items()
    }


def measure(*, steps: int, seeds: int, others: int) -> dict[str, list[Run]]:
    """Run every arm, the first and the control with more seeds than the others."""
    return {
        name: [train(seed, steps=steps, **arm) for seed in range(seeds if name in (FIRST, CONTROL) else others)]
        for name, arm in ARMS.items()
    }


def train(seed: int, *, steps: int, in_turns: bool = False, **params: Any) -> Run:
    """Run one experiment in this process."""
    from worlds.kuhn_run import SIDES, KuhnPlugin, first_tables, play, tasks

    plugins = PluginManager.from_environment()
    plugins.register(KuhnPlugin(), name="kuhn")
    began = time.process_time()
    params = {"steps": steps, **params}
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/runs.db"
        agl.Trainer(
            algorithm=[
                algorithm("kuhn", name="one", tunes="first", **params),
                algorithm("kuhn", name="two", tunes="second", source=() if in_turns else "one", **params),
            ],
            initial_resources=first_tables(seed=seed),
            schedule={"mode": "alternate"},
            plugins=plugins,
            store=url,
            folder=folder,
            seed=seed,
            progress=Quiet(),
        ).fit(play, train_dataset=tasks())
        firsts, seconds = (asyncio.run(versions(url, side)) for side in range(len(SIDES)))
    return Run(firsts=firsts, seconds=seconds, cpu_s=time.process_time() - began)


async def versions(url: str, side: int) -> list[Policy]:
    """Return a player's policies after each step."""
    from worlds.kuhn_run import SIDES, policy_of

    store = SQLiteStore(url)
    found = sorted(await store.resources(SIDES[side]), key=lambda version: version.step)
    await store.close()
    return [policy_of(version.resource.value, side) for version in found if version.algorithm]


if __name__ == "__main__":
    measured = measure(steps=STEPS, seeds=SEEDS, others=OTHERS)
    CURVES.write_text(json.dumps(curves(measured)) + "\n", encoding="utf-8")
    print(table(figures(measured)))
