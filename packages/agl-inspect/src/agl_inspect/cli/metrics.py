"""``agl metrics``: the numbers that algorithms logged, as tables, as curves, and as advice."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import click

from agl import PluginManager
from agl.contracts import Metric, Store
from agl.errors import ConfigError
from agl_inspect.cli.charts import STEP, Curve, curves_of, save_picture, text_chart
from agl_inspect.cli.suggest import rank, suggest
from agl_inspect.records.metrics import RUN, choice, experiment_step, read_runs
from agl_inspect.terminal.opening import (
    Reading,
    complete_experiment,
    pass_manager,
    reads_store,
    store_option,
    with_store,
)
from agl_inspect.terminal.output import echo, print_json, print_table
from agl_inspect.terminal.program import Modes

_run_option = click.option(
    "--run", type=RUN, metavar="N|all", help="Only this run, counted from 1, or all; the newest by default."
)
_algorithm_option = click.option(
    "--algorithm", help="Only metrics of this algorithm; validate selects the validations."
)
_name_option = click.option("--name", "names", multiple=True, help="Only these metrics, with * and ?; repeatable.")


@click.command("plot")
@click.argument("experiments", nargs=-1, metavar="[EXPERIMENT]...", shell_complete=complete_experiment)
@store_option
@_run_option
@_algorithm_option
@_name_option
@click.option("--over", default=STEP, show_default=True, help="Metric for the horizontal axis, such as spent_rollouts.")
@click.option("--output", type=click.Path(path_type=Path), help="Write a picture, such as curves.png, instead.")
@pass_manager
def plot(
    manager: PluginManager,
    experiments: tuple[str, ...],
    store_url: str | None,
    run: int | None,
    algorithm: str | None,
    names: tuple[str, ...],
    over: str,
    output: Path | None,
) -> None:
    """Draw the metrics of EXPERIMENT over its steps; without --name, the rewards.

    The steps are those of all its algorithms together, so that a validation stands above the step it follows. Several
    experiments, or several runs with --run all, are drawn together in different colours. The interval between NAME_low
    and NAME_high is shaded where both are logged, and published versions are marked. The score of a prompt search over
    its rollouts: --name best_val_score --over spent_rollouts.
    """
    wanted = names or ("reward",)

    async def work(store: Store) -> list[Curve]:
        runs = await read_runs(store, experiments, run, algorithm, wanted)
        newest = await store.resources()
        versions = [version for each in newest for version in await store.resources(each.name)]
        curves = curves_of(runs, versions, over=over)
        if not curves:
            every = sorted({metric.name for each in runs for metric in each.every})
            raise ConfigError(f"there is no metric {over!r} at the steps of {', '.join(wanted)}; {choice(over, every)}")
        return curves

    curves = with_store(manager, store_url, work)
    if output is None:
        drawn = dict.fromkeys(curve.metric for curve in curves)
        charts = [[curve for curve in curves if curve.metric == name] for name in drawn]
        width = shutil.get_terminal_size().columns
        click.echo("\n\n".join(text_chart(chart, width=width) for chart in charts))
        return
    save_picture(curves, output)
    echo(f"{len(curves)} curve{'s' if len(curves) > 1 else ''} in {output}")


@click.command(cls=Modes, modes={"--plot": plot, "--suggest": suggest, "--rank": rank})
@click.argument("experiment", required=False, shell_complete=complete_experiment)
@_run_option
@_algorithm_option
@_name_option
@click.option("--last", type=click.IntRange(min=1), help="Only the last steps of each algorithm.")
@reads_store
def metrics(
    store: Reading,
    experiment: str | None,
    run: int | None,
    algorithm: str | None,
    names: tuple[str, ...],
    last: int | None,
) -> None:
    """Print the metrics of EXPERIMENT, one line per step; by default of the store's only experiment.

    Steps are counted per algorithm. With several algorithms, a second column counts the steps of all together.
    """
    wanted = (experiment,) if experiment else ()
    runs = store.read(lambda opened: read_runs(opened, wanted, run, algorithm, names))
    tables: dict[str, list[Metric]] = {}
    for each in runs:
        for of in dict.fromkeys(metric.algorithm for metric in each.found):
            title = f"run {each.run} {of}" if len(runs) > 1 else of
            tables[title] = _last_steps([metric for metric in each.found if metric.algorithm == of], last)
    if store.as_json:
        print_json([metric for table in tables.values() for metric in table])
        return
    for number, (title, table) in enumerate(tables.items()):
        if len(tables) > 1:
            echo(f"{'' if number == 0 else chr(10)}{title}")
        _print_steps(table)


def _last_steps(found: Sequence[Metric], last: int | None) -> list[Metric]:
    steps = sorted({metric.step for metric in found})
    kept = set(steps if last is None else steps[-last:])
    return [metric for metric in found if metric.step in kept]


def _print_steps(found: Sequence[Metric]) -> None:
    """Print the metrics of one algorithm, with a row for each step and a column for each metric."""
    names = list(dict.fromkeys(metric.name for metric in found))
    cells = {(metric.step, metric.name): f"{metric.value:.4g}" for metric in found}
    places = {metric.step: experiment_step(metric) for metric in found}
    head, rows = ("step",), {step: (str(step),) for step in sorted(places)}
    if any(step != place for step, place in places.items()):
        head, rows = ("step", "of all"), {step: (str(step), str(places[step])) for step in rows}
    print_table(
        (*head, *names), [(*row, *(cells.get((step, name), "") for name in names)) for step, row in rows.items()]
    )
