"""``agl metrics --suggest`` and ``--rank``: advice from the metrics of a run, or from comparable runs."""

from collections.abc import Iterator, Sequence

import click

from agl.contracts import Metric, Store
from agl.schemas import Record
from agl_inspect.advice.suggestions import Suggestion, suggestions_in
from agl_inspect.records.metrics import RUN, read_runs
from agl_inspect.stores import command
from agl_inspect.terminal.fits import counted, print_fit, suggest_next
from agl_inspect.terminal.opening import Reading, complete_experiment, reads_store
from agl_inspect.terminal.output import print_json

_VALIDATION_FAILED = ("validate", "failed")
"""The algorithm and the name of the metric that counts a validation's failed rollouts."""


class _RunSuggestions(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The suggestions for one run, the number of its steps, and the failed rollouts of its newest validation."""

    experiment: str
    run: int
    steps: int
    failed: int
    suggestions: list[Suggestion]


@click.command("suggest")
@click.argument("experiment", required=False, shell_complete=complete_experiment)
@click.option("--run", type=RUN, metavar="N|all", help="Only this run, counted from 1, or all; the newest by default.")
@reads_store
def suggest(store: Reading, experiment: str | None, run: int | None) -> None:
    """Report what keeps EXPERIMENT from learning, with the numbers that show it and the setting to change.

    By default, EXPERIMENT is the only one of the store. It reads the metrics of a running or finished run, and changes
    nothing.
    """
    wanted = (experiment,) if experiment else ()
    found = store.read(lambda opened: _found(opened, wanted, run))
    store.show(found, lambda: _lines(store, found))


@click.command("rank")
@click.argument("experiment", required=False, shell_complete=complete_experiment)
@reads_store
def rank(store: Reading, experiment: str | None) -> None:
    """Rank the parameters of runs comparable with EXPERIMENT, and propose the next run.

    A model is fitted to eight runs at least. "agl run FILE --next" runs the proposal.
    """
    found = store.read(lambda opened: suggest_next(opened, experiment))
    if store.as_json:
        print_json(found)
    else:
        print_fit(found)


async def _found(store: Store, wanted: Sequence[str], run: int | None) -> list[_RunSuggestions]:
    return [
        _RunSuggestions(
            experiment=each.experiment,
            run=each.run,
            steps=len({(metric.algorithm, metric.step) for metric in each.every}),
            failed=_failed(each.every),
            suggestions=await suggestions_in(store, each.every),
        )
        for each in await read_runs(store, wanted, run, None, ())
    ]


def _lines(store: Reading, found: Sequence[_RunSuggestions]) -> Iterator[str]:
    for each in found:
        run = f"{each.experiment}, run {each.run}"
        if not each.suggestions and not each.failed:
            yield f"{run}: nothing stands out in {each.steps} step{'' if each.steps == 1 else 's'} and validations"
        if each.failed:
            failed = f"{each.failed} rollout{'' if each.failed == 1 else 's'} of the newest validation failed"
            look = command("runs", "--experiment", each.experiment, "--status", "failed", store_url=store.url or "")
            yield f"{run}: {failed}; list them with: {look}"
        for one in each.suggestions:
            yield f"{run}, {one.algorithm}, up to step {one.step}: {one.evidence}\n  {one.change}  [{one.rule}]"
    name = found[-1].experiment
    if others := store.read(lambda opened: counted(opened, name)):
        yield f"{name}: {others}"


def _failed(metrics: Sequence[Metric]) -> int:
    """Return how many rollouts of the newest validation failed; no rule of the suggestions reports this."""
    counts = {metric.step: metric.value for metric in metrics if (metric.algorithm, metric.name) == _VALIDATION_FAILED}
    return int(counts[max(counts)]) if counts else 0
