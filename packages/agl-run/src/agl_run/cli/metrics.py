"""``agl metrics`` and ``agl plot``: the numbers that algorithms logged, as tables or as curves."""

import math
import shutil
from collections.abc import Sequence
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from agl import PluginManager
from agl.contracts import Metric, Store
from agl.errors import ConfigError
from agl_run.cli.completion import complete_experiment
from agl_run.cli.context import pass_manager
from agl_run.cli.opening import store_option, with_store
from agl_run.cli.output import echo, json_option, print_json, print_table

HEIGHT = 10
"""Lines of a curve in the terminal."""

_BLOCKS = " ▁▂▃▄▅▆▇█"

Curve = tuple[str, list[tuple[int, float]]]
"""The name of an algorithm and a metric, with the values by step."""

_experiment_argument = click.argument("experiment", required=False, shell_complete=complete_experiment)
_algorithm_option = click.option("--algorithm", help="Only numbers of this algorithm; validate has the validations.")
_name_option = click.option("--name", "names", multiple=True, help="Only these metrics; repeatable, may hold * and ?.")


@click.command()
@_experiment_argument
@store_option
@_algorithm_option
@_name_option
@click.option("--last", type=click.IntRange(min=1), help="Only the last steps of each algorithm.")
@json_option
@pass_manager
def metrics(
    manager: PluginManager,
    experiment: str | None,
    store_url: str | None,
    algorithm: str | None,
    names: tuple[str, ...],
    last: int | None,
    as_json: bool,
) -> None:
    """Print the metrics of EXPERIMENT, a line for each step; the only experiment of the store by default."""
    found = with_store(manager, store_url, lambda store: _read(store, experiment, algorithm, names))
    tables = [_last_steps([m for m in found if m.algorithm == each], last) for each in _algorithms(found)]
    if as_json:
        print_json([metric for table in tables for metric in table])
        return
    for number, table in enumerate(tables):
        if len(tables) > 1:
            echo(f"{'' if number == 0 else chr(10)}{table[0].algorithm}")
        _print_steps(table)


@click.command()
@_experiment_argument
@store_option
@_algorithm_option
@_name_option
@click.option("--output", type=click.Path(path_type=Path), help="Write a picture, such as curves.png, instead.")
@pass_manager
def plot(
    manager: PluginManager,
    experiment: str | None,
    store_url: str | None,
    algorithm: str | None,
    names: tuple[str, ...],
    output: Path | None,
) -> None:
    """Draw the metrics of EXPERIMENT over its steps; without --name the rewards."""
    wanted = names or ("reward",)
    found = with_store(manager, store_url, lambda store: _read(store, experiment, algorithm, wanted))
    curves = _curves(found)
    if output is None:
        echo("\n\n".join(_drawn(curve, width=shutil.get_terminal_size().columns) for curve in curves))
        return
    _save(curves, output)
    echo(f"{len(curves)} curve{'s' if len(curves) > 1 else ''} in {output}")


async def _read(store: Store, experiment: str | None, algorithm: str | None, names: Sequence[str]) -> list[Metric]:
    """Read the wanted numbers in order of algorithm, step and name.

    Raises:
        ConfigError: There are none; says which there are.
    """
    name = experiment or await _only_experiment(store)
    every = await store.metrics(name)
    if not every:
        raise ConfigError(f"experiment {name!r} has no metrics; {_choice(await _experiments(store))}")
    own = [metric for metric in every if algorithm in (None, metric.algorithm)]
    if not own:
        raise ConfigError(f"no algorithm {algorithm!r} logged metrics; {_choice(_algorithms(every))}")
    found = [m for m in own if not names or any(fnmatchcase(m.name, pattern) for pattern in names)]
    if not found:
        asked = ", ".join(names)
        raise ConfigError(f"there is no metric {asked!r}; {_choice(sorted({m.name for m in own}))}")
    return found


def _choice(names: Sequence[str]) -> str:
    return f"choose from: {', '.join(names)}" if names else "run an experiment with an algorithm first"


async def _experiments(store: Store) -> list[str]:
    return [record.name for record in await store.experiments() if await store.metrics(record.name)]


async def _only_experiment(store: Store) -> str:
    names = await _experiments(store)
    if len(names) != 1:
        which = "name the experiment" if names else "no experiment of this store has metrics"
        raise ConfigError(f"{which}; {_choice(names)}")
    return names[0]


def _algorithms(found: Sequence[Metric]) -> list[str]:
    return list(dict.fromkeys(metric.algorithm for metric in found))


def _last_steps(found: Sequence[Metric], last: int | None) -> list[Metric]:
    steps = sorted({metric.step for metric in found})
    kept = set(steps if last is None else steps[-last:])
    return [metric for metric in found if metric.step in kept]


def _print_steps(found: Sequence[Metric]) -> None:
    """Print one algorithm's numbers, a column for each metric."""
    names = list(dict.fromkeys(metric.name for metric in found))
    cells = {(metric.step, metric.name): f"{metric.value:.4g}" for metric in found}
    steps = sorted({metric.step for metric in found})
    print_table(("step", *names), [(str(step), *(cells.get((step, name), "") for name in names)) for step in steps])


def _curves(found: Sequence[Metric]) -> list[Curve]:
    """Return a curve for each algorithm and metric; values that are not finite are left out."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for metric in found:
        points = curves.setdefault(f"{metric.algorithm} {metric.name}", [])
        if math.isfinite(metric.value):
            points.append((metric.step, metric.value))
    return [(name, points) for name, points in curves.items() if points]


def _drawn(curve: Curve, *, width: int) -> str:
    """Draw a curve in block characters, with its bounds on the left and its steps below."""
    name, points = curve
    values = [value for _, value in points]
    low, high = min(values), max(values)
    labels = [f"{high:.4g}", *[""] * (HEIGHT - 2), f"{low:.4g}"]
    margin = max(map(len, labels))
    columns = _columns(points, width=max(8, width - margin - 3))
    levels = [1 + round((value - low) / ((high - low) or 1.0) * (8 * HEIGHT - 1)) for value in columns]
    lines = [
        f"{label:>{margin}} ┤{''.join(_BLOCKS[max(0, min(8, level - 8 * (HEIGHT - 1 - row)))] for level in levels)}"
        for row, label in enumerate(labels)
    ]
    first, last = str(points[0][0]), str(points[-1][0])
    below = f"{' ' * margin}  {first}{last:>{max(len(last) + 1, len(levels) - len(first))}}"
    return "\n".join([f"{name}: {values[-1]:.4g} at step {points[-1][0]}", *lines, below])


def _columns(points: Sequence[tuple[int, float]], *, width: int) -> list[float]:
    """Return the value of each column: the mean of its steps, or the last value before where it has none."""
    first, span = points[0][0], points[-1][0] - points[0][0] + 1
    width = min(width, 4 * span)
    found: dict[int, list[float]] = {}
    for step, value in points:
        found.setdefault((step - first) * width // span, []).append(value)
    columns: list[float] = []
    for column in range(width):
        here = found.get(column)
        columns.append(sum(here) / len(here) if here else columns[-1])
    return columns


def _save(curves: Sequence[Curve], output: Path) -> None:
    """Write a picture with all curves, those of one metric in one diagram."""
    try:
        figures: Any = import_module("matplotlib.figure")
    except ModuleNotFoundError:
        raise ConfigError("a picture needs matplotlib; run: pip install matplotlib") from None
    names = list(dict.fromkeys(name.partition(" ")[2] for name, _ in curves))
    figure = figures.Figure(figsize=(8, 3 * len(names)), layout="constrained")
    for axis, metric in zip(figure.subplots(len(names), squeeze=False)[:, 0], names, strict=True):
        for name, points in curves:
            algorithm, _, own = name.partition(" ")
            if own == metric:
                axis.plot(*zip(*points, strict=True), marker=".", label=algorithm)
        axis.set(xlabel="step", ylabel=metric)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        axis.legend()
    try:
        figure.savefig(output)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {str(output)!r}: {error}") from error
