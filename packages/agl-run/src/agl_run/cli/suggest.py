"""``agl suggest``: what to change in an experiment, by the numbers that its run logged."""

import click

from agl import PluginManager
from agl.schemas import Record
from agl_run.cli.completion import complete_experiment
from agl_run.cli.context import pass_manager
from agl_run.cli.logged import RUN, read_runs
from agl_run.cli.opening import store_option, with_store
from agl_run.cli.output import echo, json_option, print_json
from agl_run.suggestions import Suggestion, suggestions_of


class _RunSuggestions(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The suggestions for one run, and the steps that were looked at."""

    experiment: str
    run: int
    steps: int
    suggestions: list[Suggestion]


@click.command()
@click.argument("experiment", required=False, shell_complete=complete_experiment)
@click.option("--run", type=RUN, metavar="N|all", help="Only this run, from 1, or all of them; by default the newest.")
@store_option
@json_option
@pass_manager
def suggest(
    manager: PluginManager, experiment: str | None, run: int | None, store_url: str | None, as_json: bool
) -> None:
    """Say what keeps EXPERIMENT from learning, with the numbers that show it and the setting to change.

    The only experiment of the store by default. It reads the metrics of a run that goes on or is over, and changes
    nothing.
    """
    wanted = (experiment,) if experiment else ()
    runs = with_store(manager, store_url, lambda store: read_runs(store, wanted, run, None, ()))
    found = [
        _RunSuggestions(
            experiment=each.experiment,
            run=each.run,
            steps=len({(metric.algorithm, metric.step) for metric in each.every}),
            suggestions=suggestions_of(each.every),
        )
        for each in runs
    ]
    if as_json:
        print_json(found)
        return
    for each in found:
        if not each.suggestions:
            echo(f"{each.experiment}, run {each.run}: nothing stands out in {each.steps} steps and validations")
        for one in each.suggestions:
            place = f"{each.experiment}, run {each.run}, {one.algorithm}, up to step {one.step}"
            echo(f"{place}: {one.evidence}\n  {one.change}  [{one.rule}]")
