"""Reads the metrics of an experiment's runs, and formats a step of an algorithm as one line."""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import click

from agl.contracts import Metric, Store
from agl.errors import ConfigError
from agl.hints import did_you_mean

ALL = 0
"""Run number that stands for all runs."""


class LoggedRun(NamedTuple):
    """The metrics of one run: ``found`` are the selected ones, ``every`` are all metrics of the run."""

    experiment: str
    run: int
    found: list[Metric]
    every: list[Metric]


def experiment_step(metric: Metric) -> int:
    """Return the experiment's step at which a metric was logged; if unknown, the step of the metric's algorithm."""
    return metric.step if metric.experiment_step is None else metric.experiment_step


class _Run(click.ParamType[int]):
    """The type of an option that takes a run's number or ``all``."""

    name = "run"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the run's number; :data:`ALL` for ``all``."""
        if value == "all":
            return ALL
        if isinstance(value, str) and value.isdecimal() and int(value):
            return int(value)
        self.fail(f"{value!r} is not a run; write its number, from 1, or all", param, ctx)


RUN = _Run()
"""The type of the option ``--run``: a run's number or ``all``."""


async def read_runs(
    store: Store, experiments: Sequence[str], run: int | None, algorithm: str | None, names: Sequence[str]
) -> list[LoggedRun]:
    """Read the selected metrics, in order of experiment, run, algorithm, step and name.

    Args:
        store: The store.
        experiments: Names of experiments; if empty, the only experiment that has metrics.
        run: Number of the run in each experiment, :data:`ALL` for all runs, ``None`` for the newest run.
        algorithm: Only metrics of this algorithm; ``None`` for all.
        names: Only metrics whose names match one of these patterns; empty for all.

    Raises:
        ConfigError: An experiment has no such metrics; the message names its runs, algorithms or metrics.
    """
    wanted = dict.fromkeys(experiments) or [await _only_experiment(store)]
    return [each for name in wanted for each in await _runs(store, name, run, algorithm, names)]


async def _runs(
    store: Store, experiment: str, run: int | None, algorithm: str | None, names: Sequence[str]
) -> list[LoggedRun]:
    every = await store.metrics(experiment, run=await _newest(store, experiment) if run is None else run or None)
    if not every:
        raise await _no_metrics(store, experiment, run)
    own = [metric for metric in every if algorithm in (None, metric.algorithm)]
    if not own:
        known = sorted({metric.algorithm for metric in every})
        raise ConfigError(
            f"no algorithm {algorithm!r} logged metrics of {experiment!r}; {choice(algorithm or '', known)}"
        )
    found = [m for m in own if not names or any(fnmatchcase(m.name, pattern) for pattern in names)]
    if not found:
        known = sorted({metric.name for metric in own})
        asked = ", ".join(names)
        raise ConfigError(f"{experiment!r} has no metric {asked!r}; {choice(asked, known)}")
    return [
        LoggedRun(experiment, number, [m for m in found if m.run == number], [m for m in every if m.run == number])
        for number in sorted({metric.run for metric in found})
    ]


async def _newest(store: Store, experiment: str) -> int:
    """Return the number of an experiment's newest run, which may have no metrics yet."""
    return max((record.run for record in await store.experiments(experiment)), default=1)


async def _no_metrics(store: Store, experiment: str, run: int | None) -> ConfigError:
    """Return the error for a run without metrics, which names the runs or experiments that have metrics."""
    runs = sorted({metric.run for metric in await store.metrics(experiment)})
    if not runs:
        there = choice(experiment, await _with_metrics(store))
        return ConfigError(f"experiment {experiment!r} has no metrics; {there}")
    number = await _newest(store, experiment) if run is None else run
    return ConfigError(
        f"run {number} of experiment {experiment!r} has no metrics; give --run one of these that has: "
        f"{', '.join(map(str, runs))}, or all"
    )


async def _with_metrics(store: Store) -> list[str]:
    return [record.name for record in await store.experiments() if await store.metrics(record.name)]


async def _only_experiment(store: Store) -> str:
    names = await _with_metrics(store)
    if len(names) != 1:
        which = "name the experiment" if names else "no experiment of this store has metrics"
        raise ConfigError(f"{which}; {choice('', names)}")
    return names[0]


def choice(name: str, names: Sequence[str]) -> str:
    """Return the hint for a wrong name: the name that was probably meant, or the names to choose from."""
    there = f"choose from: {', '.join(names)}" if names else "run an experiment with an algorithm first"
    return did_you_mean(name, names, otherwise=there)


_SHOWN = re.compile(r"reward|loss|score")
_FIRST = ("reward", "gold_reward", "reward_std", "loss", "score", "best_val_score")
"""Metrics that a step's line shows before all others."""
_SHARES = ("truncated", "dropped", "silent", "effective")
"""Names of shares of a step's rollouts or tokens; an algorithm logs them as metrics such as ``silent_share``."""
_COUNTS = {
    "groups_dropped": "silent groups dropped",
    "rollouts_extra": "extra rollouts",
    "rollouts_replayed": "rollouts replayed",
}
"""Metrics that count things in a step, with their text; a step's line leaves out counts of 0."""
_HEALTH = ("kl", "anchor_kl", "entropy", "logprob_gap", "staleness")
"""Metrics that show whether a policy learns in a healthy way."""
_SKIPPED = ("updates_skipped", "updates_nonfinite")
"""Metrics that count updates which were skipped because there was no gradient, or because it was not finite."""
_CLIPPED = ("clipped", "clipped_low", "clipped_high")
"""Metrics with the share of tokens whose gradient was clipped; a loss logs either the first or the other two."""


def step_line(
    name: str,
    step: int,
    *,
    metrics: Mapping[str, float],
    has_published: bool,
    total: int = 0,
    ending: tuple[str, ...] = (),
) -> str:
    """Format a step of an algorithm as one line.

    Args:
        name: The algorithm's name.
        step: The algorithm's own step, from 1.
        metrics: The step's metrics by name, in any order; at most four about rewards, losses and scores are shown.
        has_published: True if the step published a version. A step that skipped updates and published nothing is
            marked ``trained nothing``.
        total: Total number of the algorithm's steps; a number below ``step``, such as 0, means unknown.
        ending: Further parts of the line, such as the time left; empty parts are left out.
    """
    named = sorted(key for key in metrics if _SHOWN.search(key) and key not in _FIRST)
    shown = [f"{key} {metrics[key]:.3f}" for key in [*filter(metrics.__contains__, _FIRST), *named][:4]]
    shown += [f"{metrics[f'{key}_share']:.0%} {key}" for key in _SHARES if f"{key}_share" in metrics]
    shown += [f"{key} {metrics[key]:.3g}" for key in _HEALTH if key in metrics]
    shown += [f"{metrics[key]:.0f} {text}" for key, text in _COUNTS.items() if metrics.get(key)]
    clipped = sum(metrics.get(key, 0.0) for key in _CLIPPED)
    shown += [f"{clipped:.0%} clipped"] if clipped else []
    if any(metrics.get(key) for key in _SKIPPED) and not has_published:
        shown.append("trained nothing")
    place = f"step {step} of {total}" if total >= max(step, 1) else f"step {step}"
    return "; ".join((f"{name} {place}: {', '.join(shown) or 'done'}", *filter(None, ending)))


def version_of_step(experiment: str, run: int, algorithm: str, step: int) -> str:
    """Return the name of the versions that a step of an algorithm publishes in a run of an experiment."""
    return f"{experiment}-{run}-{algorithm}-{step}"
