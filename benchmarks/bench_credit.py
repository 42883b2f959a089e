"""Credit on a team with known contributions: are the signs right, and how many steps does training take?

Every run is a whole experiment: agent, ``openai`` client, capture, store, replays and an algorithm that climbs on the
experiment's credit. One attempt runs at a time, so that equal seeds give equal runs. Steps to the goal are medians over
seeds at each credit's best step length of :data:`RATES`; a run that does not get there counts as :data:`LIMIT` steps,
which flatters it.

Run alone: ``python -m benchmarks.bench_credit``.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

import agl
from agl import PluginManager
from agl.algorithms import algorithm, component
from agl.stores import MemoryStore
from agl_run import Quiet, policy
from benchmarks._harness import Figure, table
from worlds.team_run import TeamPlugin, play, tasks

REPLAYING = ("leave-one-out", "shapley")
CREDITS = ("episode", *REPLAYING)
RATES = (1.0, 2.0, 4.0)
GROUP = 2
ROOMS = 4
LIMIT = 100


@dataclass(frozen=True, kw_only=True)
class Run:
    """The result of one experiment; rollouts include replays, CPU seconds are those of the whole process."""

    steps: int
    rollouts: int
    replays: int
    signs: float
    active: float
    cpu_s: float


def run(*, quick: bool) -> list[Figure]:
    """All rows of the table."""
    seeds = range(1 if quick else 3)
    return [*signs(steps=2 if quick else 10), *training(seeds, rates=RATES[-1:] if quick else RATES)]


def signs(*, steps: int) -> list[Figure]:
    """The share of advantages with the right sign, for a policy that says every word equally often."""
    play_team("episode", lr=0.0, steps=1)  # what is imported on the first run is not measured
    found: list[Figure] = []
    plain = {name: play_team(name, lr=0.0, steps=steps) for name in CREDITS}
    chained = {name: play_team(name, lr=0.0, steps=steps, is_chained=True) for name in CREDITS}
    for name in REPLAYING:
        found += [
            sign_figure(f"signs right, {name}", plain[name].signs, plain["episode"].signs, bar=0.95),
            sign_figure(
                f"signs right where the role changed the reward, {name}", plain[name].active, plain["episode"].active
            ),
            sign_figure(
                f"signs right, every agent hears the others, {name}", chained[name].signs, chained["episode"].signs
            ),
        ]
    return [*found, *costs(plain)]


def sign_figure(name: str, value: float, baseline: float, *, bar: float | None = None) -> Figure:
    return Figure(name=name, value=value, unit="of calls", bar=bar, baseline=baseline, baseline_name="episode")


def costs(runs: dict[str, Run]) -> list[Figure]:
    """The cost of a step's replays beside the rollouts that they replay."""
    episode = runs["episode"]
    plain = episode.cpu_s / episode.rollouts
    return [
        Figure(
            name=f"CPU per replay, {name}",
            value=1e3 * (runs[name].cpu_s - episode.cpu_s) / runs[name].replays,
            unit="ms",
            better="lower",
            baseline=1e3 * plain,
            baseline_name=f"a training rollout; {runs[name].replays / episode.rollouts:.2g} replays for each",
        )
        for name in REPLAYING
    ]


def training(seeds: Sequence[int], *, rates: Sequence[float]) -> list[Figure]:
    """Steps and rollouts to an expected reward of 0.9, each credit at its best step length."""
    best = {name: best_of(name, seeds, rates) for name in CREDITS}
    found: list[Figure] = []
    for name in REPLAYING:
        for what, index in (("steps", 0), ("rollouts with replays", 1)):
            base = best["episode"][index]
            figure = Figure(
                name=f"{what} to reward 0.9, {name}, step length {best[name][2]:g}",
                value=best[name][index],
                unit=what.split()[0],
                bar=0.5 * base if what == "steps" else None,
                better="lower",
                baseline=base,
                baseline_name=f"episode, step length {best['episode'][2]:g}",
            )
            found.append(figure)
    return found


def best_of(credit: str, seeds: Sequence[int], rates: Sequence[float]) -> tuple[float, float, float]:
    """Median steps, median rollouts and the step length at which they are least."""
    found: list[tuple[float, float, float]] = []
    for rate in rates:
        runs = [play_team(credit, lr=rate, steps=LIMIT, seed=seed) for seed in seeds]
        steps, rollouts = (statistics.median(getattr(one, name) for one in runs) for name in ("steps", "rollouts"))
        found.append((steps, rollouts, rate))
    return min(found)


def play_team(credit: str, *, lr: float, steps: int, seed: int = 0, is_chained: bool = False) -> Run:
    """One experiment, in this process."""
    plugins = PluginManager.from_environment()
    plugins.register(TeamPlugin(), name="team")
    store, started = MemoryStore("memory://"), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        trainer = agl.Trainer(
            algorithm=algorithm("team-gradient", tunes="team", lr=lr, steps=steps, group_size=GROUP),
            policies={"team": policy("team-table", seed=seed)},
            credit=component(credit, baseline="counterfactual") if credit in REPLAYING else credit,
            gateway="none",
            plugins=plugins,
            store=store,
            folder=folder,
            n_runners=1,
            progress=Quiet(),
        )
        result = trainer.fit(play, train_dataset=tasks(is_chained=is_chained))
    cpu_s = time.process_time() - started
    values: dict[str, list[float]] = {}
    for metric in asyncio.run(store.metrics("experiment")):
        values.setdefault(metric.name, []).append(metric.value)
    taken, replays = result.steps["team-gradient"], int(sum(values.get("replays", [])))
    return Run(
        steps=taken,
        rollouts=taken * GROUP * ROOMS + replays,
        replays=replays,
        signs=statistics.fmean(values["signs_right"]),
        active=statistics.fmean(values["signs_right_of_active"]),
        cpu_s=cpu_s,
    )


if __name__ == "__main__":
    print(table(run(quick=False)))
