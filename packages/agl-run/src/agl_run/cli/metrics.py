"""``agl metrics`` and ``agl plot``: the numbers that algorithms logged, as tables or as curves."""

import shutil
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import click

from agl import PluginManager
from agl.contracts import Metric, Store
from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl_run.cli.completion import complete_experiment
from agl_run.cli.context import pass_manager
from agl_run.cli.curves import STEP, Curve, curves_of, drawn, save_picture
from agl_run.cli.opening import store_option, with_store
from agl_run.cli.output import echo, json_option, print_json, print_table

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
@click.option("--over", default=STEP, show_default=True, help="Metric on the axis below, such as spent_rollouts.")
@click.option("--output", type=click.Path(path_type=Path), help="Write a picture, such as curves.png, instead.")
@pass_manager
def plot(
    manager: PluginManager,
    experiment: str | None,
    store_url: str | None,
    algorithm: str | None,
    names: tuple[str, ...],
    over: str,
    output: Path | None,
) -> None:
    """Draw the metrics of EXPERIMENT over its steps; without --name the rewards.

    A metric that has NAME_low and NAME_high beside it is drawn with this interval, and the versions that an algorithm
    published are marked. The score of a prompt search over its rollouts: --name best_val_score --over spent_rollouts.
    """
    wanted = names or ("reward",)

    async def work(store: Store) -> list[Curve]:
        found = await _read(store, experiment, algorithm, wanted)
        every = await store.metrics(found[0].experiment)
        newest = await store.resources()
        versions = [version for each in newest for version in await store.resources(each.name)]
        curves = curves_of(found, every, versions, over=over)
        if not curves:
            raise ConfigError(
                f"there is no metric {over!r} at the steps of {', '.join(wanted)}; "
                f"{_choice(over, sorted({metric.name for metric in every}))}"
            )
        return curves

    curves = with_store(manager, store_url, work)
    if output is None:
        echo("\n\n".join(drawn(curve, width=shutil.get_terminal_size().columns) for curve in curves))
        return
    save_picture(curves, output)
    echo(f"{len(curves)} curve{'s' if len(curves) > 1 else ''} in {output}")


async def _read(store: Store, experiment: str | None, algorithm: str | None, names: Sequence[str]) -> list[Metric]:
    """Read the wanted numbers in order of algorithm, step and name.

    Raises:
        ConfigError: There are none; says which there are.
    """
    name = experiment or await _only_experiment(store)
    every = await store.metrics(name)
    if not every:
        raise ConfigError(f"experiment {name!r} has no metrics; {_choice(name, await _experiments(store))}")
    own = [metric for metric in every if algorithm in (None, metric.algorithm)]
    if not own:
        raise ConfigError(f"no algorithm {algorithm!r} logged metrics; {_choice(algorithm or '', _algorithms(every))}")
    found = [m for m in own if not names or any(fnmatchcase(m.name, pattern) for pattern in names)]
    if not found:
        asked = ", ".join(names)
        raise ConfigError(f"there is no metric {asked!r}; {_choice(asked, sorted({m.name for m in own}))}")
    return found


def _choice(name: str, names: Sequence[str]) -> str:
    choice = f"choose from: {', '.join(names)}" if names else "run an experiment with an algorithm first"
    return did_you_mean(name, names, otherwise=choice)


async def _experiments(store: Store) -> list[str]:
    return [record.name for record in await store.experiments() if await store.metrics(record.name)]


async def _only_experiment(store: Store) -> str:
    names = await _experiments(store)
    if len(names) != 1:
        which = "name the experiment" if names else "no experiment of this store has metrics"
        raise ConfigError(f"{which}; {_choice('', names)}")
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
