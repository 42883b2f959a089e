"""``python -m benchmarks.seeds EXAMPLE [--seeds N ...]``: an example's whole training, once for each seed, as a table.

One run says little about a training that draws at random, so this runs an example's ``demo.py`` for several seeds,
each in a copy of the example's folder: one after the other, or ``--at-once`` several, each on one core. A seed that is
done is not run again, so an interrupted measurement continues where it stopped; ``--fresh`` begins anew. The
validations come from the store that the run wrote.

A run is *steady* if the versions that are live at its end are within 0.05 of its best validation; the column ``last
step`` is what it would have ended with under ``final = "last"``. The load is the mean number of processes that wanted a
core in the minute before the run and in its last one: well above the number of cores, the machine was busy.

It needs the example's packages, see its README, and is not part of ``python -m benchmarks``, whose figures have bars
that a machine can meet in minutes.
"""

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agl.contracts import Metric
from agl_store_sqlite import SQLiteStore

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ("calc", "crew", "glance", "harness", "mixed", "rag", "sql")
"""The examples; the experiment of each has its name."""

OPTION = {"mixed": "--seeds"}
"""The option of a demo that chooses the seed, where it is not ``--seed``."""

STEADY = 0.05


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One seed's run.

    Attributes:
        validations: Mean rewards by the steps of all algorithms before them.
        warm: Steps of the warm-up.
        fresh: Mean rewards of the last choice, where close ones were measured again, by the same steps.
        seconds: The demo's time by the clock.
        cpu_s: The same of all its processes on a core.
        load: Load of the machine before and at the end.
    """

    seed: int
    validations: dict[int, float]
    warm: int
    fresh: dict[int, float]
    seconds: float
    cpu_s: float
    load: tuple[float, float]

    @property
    def start(self) -> float:
        return self.validations[min(self.validations)]

    @property
    def warmed(self) -> float:
        """The first validation after the warm-up."""
        return self.validations[min(step for step in self.validations if step >= self.warm)]

    @property
    def best(self) -> float:
        return max(self.validations.values())

    @property
    def last(self) -> float:
        return self.validations[max(self.validations)]

    @property
    def live(self) -> float:
        """The reward of the versions that are live at the end, on fresh rollouts if these decided."""
        return max(self.fresh.values(), default=self.best)

    @property
    def is_steady(self) -> bool:
        return self.live >= self.best - STEADY


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one seed of an example runs."""

    example: str
    seed: int
    root: Path

    @property
    def folder(self) -> Path:
        return self.root / self.example / f"seed-{self.seed}"

    @property
    def result(self) -> Path:
        return self.folder.with_suffix(".json")

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")


def train(place: Place) -> Run:
    """Run the demo in a copy of the example; raises ``CalledProcessError`` when it fails."""
    shutil.rmtree(place.folder, ignore_errors=True)
    shutil.copytree(EXAMPLES / place.example, place.folder, ignore=shutil.ignore_patterns("out", "tests", "*.png"))
    command = [sys.executable, "demo.py", OPTION.get(place.example, "--seed"), str(place.seed)]
    before, started = os.getloadavg()[0], time.monotonic()
    with place.log.open("w", encoding="utf-8") as log:
        demo = subprocess.Popen(command, cwd=place.folder, stdout=log, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(demo.pid, 0)  # the demo's own CPU time and that of its processes
    demo.returncode = os.waitstatus_to_exitcode(status)
    if demo.returncode:
        raise subprocess.CalledProcessError(demo.returncode, command)
    seconds = time.monotonic() - started
    metrics = asyncio.run(read_metrics(place.folder / "out" / "runs.db", place.example))
    return Run(
        seed=place.seed,
        validations=rewards(metrics, name="reward"),
        warm=max(metric.experiment_step or 0 for metric in metrics if metric.algorithm.startswith("sft")),
        fresh=rewards(metrics, name="final_reward"),
        seconds=seconds,
        cpu_s=used.ru_utime + used.ru_stime,
        load=(before, os.getloadavg()[0]),
    )


async def read_metrics(database: Path, experiment: str) -> list[Metric]:
    store = SQLiteStore(f"sqlite:///{database}")
    metrics = await store.metrics(experiment)
    await store.close()
    return metrics


def rewards(metrics: Sequence[Metric], *, name: str) -> dict[int, float]:
    """The validation's means by the steps before them."""
    return {m.step: m.value for m in metrics if (m.algorithm, m.name) == ("validate", name)}


def measure(place: Place, *, is_fresh: bool) -> Run:
    """The result of one seed, from the file of an earlier measurement if there is one."""
    if place.result.is_file() and not is_fresh:
        return msgspec.json.decode(place.result.read_bytes(), type=Run)
    run = train(place)
    place.result.write_bytes(msgspec.json.encode(run))
    shutil.rmtree(place.folder)
    return run


def table(runs: Sequence[Run]) -> str:
    """The runs as a table in Markdown, one line for each seed."""
    lines = [
        "| Seed | With random weights | After `sft` | Best validation | After the last step | Live at the end "
        "| CPU seconds | Seconds | Load |",
        f"|{'---|' * 9}",
    ]
    for run in sorted(runs, key=lambda run: run.seed):
        means = " | ".join(f"{value:.2f}" for value in (run.start, run.warmed, run.best, run.last, run.live))
        load = " to ".join(f"{load:.0f}" for load in run.load)
        lines.append(f"| {run.seed} | {means} | {run.cpu_s:.0f} | {run.seconds:.0f} | {load} |")
    return "\n".join(lines)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.seeds", description=__doc__)
    parser.add_argument("example", choices=NAMES)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)), help="0 to 9 by default")
    parser.add_argument("--at-once", type=int, default=1, help="seeds that train at the same time, 1 by default")
    parser.add_argument("--out", type=Path, default=Path("runs/seeds"), help="where results stay: %(default)s")
    parser.add_argument("--fresh", action="store_true", help="run seeds that are done again")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    folder = options.out / options.example
    folder.mkdir(parents=True, exist_ok=True)
    for shared in EXAMPLES.glob("*.py"):  # next to the copies, as they are next to the examples
        shutil.copy(shared, folder)
    places = [Place(example=options.example, seed=seed, root=options.out.resolve()) for seed in options.seeds]
    runs: list[Run] = []
    pool = ThreadPoolExecutor(options.at_once)
    started = {pool.submit(measure, place, is_fresh=options.fresh): place for place in places}
    try:
        for future in as_completed(started):
            runs.append(future.result())
            print(f"seed {runs[-1].seed}: {runs[-1].live:.2f} at the end, {runs[-1].seconds:.0f} s", flush=True)
    except subprocess.CalledProcessError as error:
        place = started[future]
        print(f"seed {place.seed} ended with exit status {error.returncode}; see {place.log}", file=sys.stderr)
        return 1
    finally:
        pool.shutdown(cancel_futures=True)  # seeds that are running end first, and are not run again
    steady = sum(run.is_steady for run in runs)
    print(f"\n{table(runs)}\n\n{steady} of {len(runs)} ended within {STEADY} of their best validation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
