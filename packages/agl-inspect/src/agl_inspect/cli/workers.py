"""``agl runs workers``: list the processes that run experiments or take part in them, with their signs of life."""

import click

from agl import PluginManager
from agl_inspect.records.workers import ListedWorker, list_workers
from agl_inspect.terminal.context import pass_manager
from agl_inspect.terminal.opening import store_option, with_store
from agl_inspect.terminal.output import json_option, print_json, print_table, when


@click.command()
@click.option("--experiment", help="Only processes of this experiment.")
@store_option
@json_option
@pass_manager
def workers(manager: PluginManager, experiment: str | None, store_url: str | None, as_json: bool) -> None:
    """List the trainers and workers of the store's experiments, and whether they are busy, idle or gone.

    A trainer or worker reports every four seconds; without a report for 15 seconds, or with its process ended on this
    machine, it is gone.
    """
    found = with_store(manager, store_url, lambda store: list_workers(store, experiment))
    if as_json:
        print_json(found)
    elif found:
        columns = ("worker", "experiment", "role", "state", "attempts", "since", "last sign of life")
        print_table(columns, [_row(item) for item in found], least=("since", "role"))
    else:
        click.echo("no process takes part in an experiment of this store")


def _row(item: ListedWorker) -> tuple[str, ...]:
    name = f"{item.host}:{item.pid}" if item.pid else item.worker
    attempts, since, seen = str(item.attempts), when(item.since), when(item.seen_at)
    return name, item.experiment, item.role, item.state, attempts, since, seen
