"""Prompt optimisers on the scripted prompt world: rollouts to close 95 % of the gap, overshoot, honesty, wall time.

Every run is a whole experiment: ``Trainer``, memory store, worker, reward, and the optimiser's model over HTTP; the
task model is a function in the process, so that a rollout costs under a millisecond of CPU. The world knows the true
expected score of every prompt, so nothing here trusts what an algorithm says about itself:

- *Rollouts to 95 %*: how many rollouts of the algorithm had been started when the best prompt on disk first closed
  95 % of the gap between seed and solution by expected score. A run that never does counts as its whole budget.
- *Overshoot*: rollouts started beyond the budget.
- *Reported minus true*: the score that the result file reports for its winner, less its expected score.
- *Questions*: to the optimiser's model, in the whole run.
- *Memorised and useless lines* of the winner: notes about one order, and lines that answer no rule of the world.
- *Published without a gain*: runs on the world `STILL`, whose first prompt holds every rule, so that no text can be
  better, that published another text.
- *Wall time*: of one run with 8 workers and with 1, at 50 ms for each answer of the task model.

`apo` and its constants were made on worlds with seeds below 120, none of which is measured here.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import msgspec

import agl
from agl.algorithms import algorithm
from agl.schemas import Rollout
from agl.stores import MemoryStore
from agl_run import Quiet
from agl_testing.model_server import ScriptedModelServer
from benchmarks._harness import Figure
from worlds.prompts import LINE, NOTE, WORLDS, PromptWorld, prompt_name
from worlds.prompts_optimizer import ScriptedOptimizer
from worlds.prompts_run import HIDDEN, model_server, order_agent, order_reward

ALGORITHMS = ("apo", "gepa", "random")
BUDGETS = {name: 600 if name in ("easy", "memorising", "cluttered") else 1000 for name in WORLDS}
"""Rollouts that each run may pay for."""

FRESH = range(200, 240)
"""Seeds of the worlds and of the searches in them; nothing was ever tuned on one of these."""

STILL = "cluttered"
"""The world for runs that start from the solution, with `STILL_NOISE`; each of them may pay for 600 rollouts."""

STILL_NOISE = 0.25
CLOSED = 0.95
HONEST = 0.02
LATENCY_S = 0.05


@dataclass(kw_only=True)
class Watch:
    """Counts the rollouts of one run as they start, and notes when the best prompt on disk became good enough."""

    world: PromptWorld
    algorithm: str
    folder: Path
    started: int = 0
    reached: int | None = None
    _seen: dict[Path, int] = field(default_factory=dict[Path, int])

    def __call__(self, rollout: Rollout) -> None:
        """Called at the start of every rollout."""
        if rollout.metadata.get("algorithm") not in (self.algorithm, "validate"):  # the budget pays for both
            return
        self.look()
        self.started += 1

    def look(self) -> None:
        """Read the best prompts if they changed."""
        stamps = {path: path.stat().st_mtime_ns for path in self.folder.glob("best/*.txt")}
        if self.reached is not None or stamps == self._seen or len(stamps) < len(self.world.roles):
            return
        self._seen = stamps
        if self.world.gap_closed(self.best()) >= CLOSED:
            self.reached = self.started

    def best(self) -> dict[str, str]:
        """The best prompts on disk, by resource name."""
        return {path.stem: path.read_text(encoding="utf-8") for path in self.folder.glob("best/*.txt")}


@dataclass(frozen=True, kw_only=True)
class Run:
    """The figures of one run.

    Attributes:
        rollouts: Until 95 % of the gap was closed, the whole budget if it never was.
        overshoot: Rollouts beyond the budget.
        calls: Questions to the optimiser's model in the whole run.
        inflation: Reported minus true score of the winner.
        memorised: Lines of the winner that note the answer of one order.
        useless: Lines of the winner that answer no rule.
        wall_s: Seconds that it took.
        has_changed: Whether the winner differs from the first prompt.
    """

    rollouts: int
    is_closed: bool
    overshoot: int
    calls: int
    inflation: float
    memorised: int
    useless: int
    wall_s: float
    has_changed: bool


def run_once(
    name: str,
    world: PromptWorld,
    server: ScriptedModelServer,
    *,
    budget: int,
    seed: int,
    workers: int = 16,
    latency_s: float = 0.0,
    is_still: bool = False,
) -> Run:
    """One experiment from start to end; with ``is_still`` it starts from the world's solution."""
    first = world.solution() if is_still else world.seeds()
    with tempfile.TemporaryDirectory() as folder:
        watch = Watch(world=world, algorithm=name, folder=Path(folder) / "orders/run-1" / name)
        optimizer = {"base_url": server.base_url, "model": "editor"}
        trainer = agl.Trainer(
            name="orders",
            algorithm=algorithm(name, tunes=list(first), optimizer=optimizer, budget=budget),
            store=MemoryStore("memory://"),
            n_runners=workers,
            initial_resources=first,
            rewards=(order_reward(world),),
            hidden=HIDDEN,
            progress=Quiet(),
            folder=folder,
            workdir=folder,
            seed=seed,
        )
        started = time.perf_counter()
        trainer.fit(order_agent(world, latency_s=latency_s, fault=watch), world.train, world.val)
        wall_s = time.perf_counter() - started
        watch.look()
        result = json.loads((watch.folder / "result.json").read_text(encoding="utf-8"))
        return Run(
            rollouts=budget if watch.reached is None else watch.reached,
            is_closed=watch.reached is not None,
            overshoot=max(0, watch.started - budget),
            calls=result["spent"]["calls"],
            inflation=result["score"]["mean"] - world.expected(watch.best()),
            memorised=sum(len(NOTE.findall(text)) for text in watch.best().values()),
            useless=useless_lines(world, watch.best()),
            wall_s=wall_s,
            has_changed=watch.best() != {prompt: text.template for prompt, text in first.items()},
        )


def useless_lines(world: PromptWorld, prompts: Mapping[str, str]) -> int:
    """Count the lines of prompts that the task model obeys and no rule asks for."""
    rules = {(prompt_name(rule.role), rule.field, rule.style) for rule in world.rules}
    held = [(name, *line) for name, text in prompts.items() for line in LINE.findall(text)]
    return sum(line not in rules for line in held)


def run_all(setting: str, *, seeds: Sequence[int], quick: bool) -> dict[str, list[Run]]:
    """All algorithms on one setting, the same worlds for each."""
    runs: dict[str, list[Run]] = {name: [] for name in ALGORITHMS}
    budget = BUDGETS[setting] // (2 if quick else 1)
    for seed in seeds:
        world = WORLDS[setting](seed)
        with model_server(world, ScriptedOptimizer(seed=seed, memorises=world.memorises)) as server:
            for name in ALGORITHMS:
                runs[name].append(run_once(name, world, server, budget=budget, seed=seed))
    return runs


def setting_figures(setting: str, runs: dict[str, list[Run]]) -> list[Figure]:
    """Median rollouts and the share of runs that closed the gap."""
    medians = {name: statistics.median(run.rollouts for run in found) for name, found in runs.items()}
    figures: list[Figure] = []
    for name, found in runs.items():
        bar = {"apo": medians["gepa"], "random": medians["apo"] * 1.5}.get(name)
        figures.append(
            Figure(
                name=f"{setting}: rollouts of {name} to close 95 %, median",
                value=medians[name],
                unit="rollouts",
                bar=bar,
                better="higher" if name == "random" else "lower",
                baseline=None if name == "gepa" else medians["gepa"],
                baseline_name="" if name == "gepa" else "gepa",
            )
        )
        share = sum(run.is_closed for run in found) / len(found)
        figures.append(Figure(name=f"{setting}: runs of {name} that closed 95 %", value=100 * share, unit="%"))
        calls = statistics.median(run.calls for run in found)
        figures.append(Figure(name=f"{setting}: questions of {name}, median", value=calls, unit="questions"))
        inflation = statistics.fmean(run.inflation for run in found)
        figures.append(Figure(name=f"{setting}: reported minus true score of {name}, mean", value=inflation, unit=""))
        useless = statistics.fmean(run.useless for run in found)
        figures.append(
            Figure(name=f"{setting}: useless lines in a winner of {name}, mean", value=useless, unit="lines")
        )
    return figures


def honesty_figures(runs: Sequence[tuple[str, Run]]) -> list[Figure]:
    """Overshoot and inflation of each algorithm over all settings."""
    figures: list[Figure] = []
    for name in ALGORITHMS:
        mine = [run for owner, run in runs if owner == name]
        worst = max(run.overshoot for run in mine)
        mean = statistics.fmean(run.inflation for run in mine)
        figures.append(
            Figure(
                name=f"{name}: memorised lines in winners, all runs",
                value=sum(run.memorised for run in mine),
                unit="lines",
                bar=0,
                better="lower",
            )
        )
        figures.append(
            Figure(name=f"{name}: rollouts beyond the budget, worst", value=worst, unit="", bar=0, better="lower")
        )
        figures.append(
            Figure(name=f"{name}: reported minus true score, mean", value=mean, unit="", bar=HONEST, better="lower")
        )
    return figures


def still_figures(*, seeds: Sequence[int], quick: bool) -> list[Figure]:
    """Share of the runs of each algorithm that published a text although none could be better."""
    changed = dict.fromkeys(ALGORITHMS, 0)
    for seed in seeds:
        world = msgspec.structs.replace(WORLDS[STILL](seed), noise=STILL_NOISE)
        with model_server(world, ScriptedOptimizer(seed=seed)) as server:
            for name in ALGORITHMS:
                run = run_once(name, world, server, budget=300 if quick else 600, seed=seed, is_still=True)
                changed[name] += run.has_changed
    return [
        Figure(
            name=f"nothing to gain: runs of {name} that published a text",
            value=100 * count / len(seeds),
            unit="%",
            bar=20,
            better="lower",
        )
        for name, count in changed.items()
    ]


def wall_figure(*, budget: int, seeds: Sequence[int]) -> Figure:
    """Median wall time of ``apo`` with eight workers over that with one, in turn in several worlds."""
    walls: dict[int, list[float]] = {1: [], 8: []}
    for seed in seeds:
        world = WORLDS["easy"](seed)
        for workers, taken in walls.items():
            with model_server(world, ScriptedOptimizer()) as server:
                run = run_once("apo", world, server, budget=budget, seed=seed, workers=workers, latency_s=LATENCY_S)
            taken.append(run.wall_s)
    one, eight = (statistics.median(taken) for taken in walls.values())
    return Figure(
        name="apo: wall time with 8 workers, 50 ms per answer",
        value=eight,
        unit="s",
        bar=one / 5,
        better="lower",
        baseline=one,
        baseline_name="1 worker",
    )


def run(*, quick: bool = False) -> list[Figure]:
    """All figures; ``quick`` for 3 seeds and half of the budget; none where an optimiser is not installed."""
    if not all(map(find_spec, ("agl_algo_apo", "gepa"))):
        return []
    figures: list[Figure] = []
    every: list[tuple[str, Run]] = []
    for setting in WORLDS:
        runs = run_all(setting, seeds=FRESH[:3] if quick else FRESH, quick=quick)
        figures += setting_figures(setting, runs)
        every += [(name, one) for name, found in runs.items() for one in found]
    wall = wall_figure(budget=200 if quick else 400, seeds=FRESH[:1] if quick else FRESH[:3])
    still = still_figures(seeds=FRESH[:3] if quick else FRESH, quick=quick)
    return [*figures, *still, *honesty_figures(every), wall]
