"""``agl run --sync``: write what W&B, MLflow or TensorBoard lack of a run."""

from pathlib import Path

import click

from agl import PluginManager
from agl_inspect.terminal import echo, pass_manager
from agl_run.run.blocking import run_blocking
from agl_run.run.syncing import sync_plan
from agl_run.terminal import experiment_argument, make_trainer


@click.command("sync")
@experiment_argument
@click.option("--run", type=click.IntRange(min=1), metavar="N", help="The run, from 1; by default the newest.")
@pass_manager
def sync(manager: PluginManager, file: Path, settings: tuple[str, ...], run: int | None) -> None:
    """Write what the systems that FILE names as exporters, such as W&B, lack of a run; the store has all of it.

    A running experiment does that itself.
    """
    plan = make_trainer(file, settings, manager=manager).plan()
    run_blocking(lambda: sync_plan(plan, run=run, say=echo))
