"""``agl metrics --suggest`` and ``--rank``: advice by a run's numbers, or by runs like it."""

from collections.abc import Sequence

import click

from agl import PluginManager
from agl.contracts import Metric
from agl.schemas import Record
from agl_inspect.advice.suggestions import Suggestion, suggestions_of
from agl_inspect.records.metrics import RUN, read_runs
from agl_inspect.stores.hints import command
from agl_inspect.terminal.completion import complete_experiment
from agl_inspect.terminal.context import pass_manager
from agl_inspect.terminal.opening import store_option, with_store
from agl_inspect.terminal.output import echo, json_option, print_json
from agl_inspect.terminal.ranking import counted, print_fit, suggest_next

_VALIDATION_FAILED = ("validate", "failed")
"""Algorithm and name of the number of rollouts that failed in a validation."""


class _RunSuggestions(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The suggestions for one run, the steps that were looked at, and the newest validation's failed rollouts."""

    experiment: str
    run: int
    steps: int
    failed: int
    suggestions: list[Suggestion]


@click.command("suggest")
@click.argument("experiment", required=False, shell_complete=complete_experiment)
@click.option("--run", type=RUN, metavar="N|all", help="Only this run, from 1, or all of them; by default the newest.")
@store_option
@json_option
@pass_manager
def suggest(
    manager: PluginManager,
    experiment: str | None,
    run: int | None,
    store_url: str | None,
    as_json: bool,
) -> None:
    """Say what keeps EXPERIMENT from learning, with the numbers that show it and the setting to change.

    The only experiment of the store by default. It reads the metrics of a run that goes on or is over, and changes
    nothing.
    """
    _look(manager, experiment, run, store_url, as_json=as_json)


@click.command("rank")
@click.argument("experiment", required=False, shell_complete=complete_experiment)
@store_option
@json_option
@pass_manager
def rank(manager: PluginManager, experiment: str | None, store_url: str | None, as_json: bool) -> None:
    """Rank the parameters of the runs that compare with EXPERIMENT, and propose the next run.

    A model is fitted to eight runs at least. "agl run FILE --next" runs the proposal.
    """
    found = suggest_next(manager, experiment, store_url)
    if as_json:
        print_json(found)
    else:
        print_fit(found)


def _look(
    manager: PluginManager, experiment: str | None, run: int | None, store_url: str | None, *, as_json: bool
) -> None:
    """Print what rules find in the numbers of an experiment."""
    wanted = (experiment,) if experiment else ()
    runs = with_store(manager, store_url, lambda store: read_runs(store, wanted, run, None, ()))
    found = [
        _RunSuggestions(
            experiment=each.experiment,
            run=each.run,
            steps=len({(metric.algorithm, metric.step) for metric in each.every}),
            failed=_failed(each.every),
            suggestions=suggestions_of(each.every),
        )
        for each in runs
    ]
    if as_json:
        print_json(found)
        return
    for each in found:
        if not each.suggestions and not each.failed:
            place = f"{each.experiment}, run {each.run}"
            echo(f"{place}: nothing stands out in {each.steps} step{'' if each.steps == 1 else 's'} and validations")
        if each.failed:
            failed = f"{each.failed} rollout{'' if each.failed == 1 else 's'} of the newest validation failed"
            look = command("runs", "--experiment", each.experiment, "--status", "failed", store_url=store_url or "")
            echo(f"{each.experiment}, run {each.run}: {failed}; list them with: {look}")
        for one in each.suggestions:
            place = f"{each.experiment}, run {each.run}, {one.algorithm}, up to step {one.step}"
            echo(f"{place}: {one.evidence}\n  {one.change}  [{one.rule}]")
    if others := counted(manager, found[-1].experiment, store_url):
        echo(f"{found[-1].experiment}: {others}")


def _failed(metrics: Sequence[Metric]) -> int:
    """Return how many rollouts of the newest validation failed; rules speak of steps only, and may have none yet."""
    counts = {metric.step: metric.value for metric in metrics if (metric.algorithm, metric.name) == _VALIDATION_FAILED}
    return int(counts[max(counts)]) if counts else 0
