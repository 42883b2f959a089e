"""``agl dev``: run the agent on a few tasks and show its calls and rows; nothing is trained."""

import sys
from pathlib import Path

import click

from agl import PluginManager
from agl_inspect.terminal.opening import pass_manager
from agl_inspect.terminal.output import json_option, print_json
from agl_run.display.progress import default_progress
from agl_run.display.result_text import describe_episode
from agl_run.run.blocking import run_blocking
from agl_run.run.fit import dev_plan
from agl_run.terminal import experiment_argument, make_trainer


@click.command()
@experiment_argument
@click.option("-n", "--tasks", type=click.IntRange(min=1), default=3, show_default=True, help="How many tasks to try.")
@json_option
@pass_manager
def dev(manager: PluginManager, file: Path, settings: tuple[str, ...], tasks: int, as_json: bool) -> None:
    """Run the agent of FILE on a few training tasks and show its calls.

    The exit status is 1 when no rollout succeeded.
    """
    trainer = make_trainer(file, settings, manager=manager)
    plan = trainer.plan()
    result = run_blocking(lambda: dev_plan(plan, progress=default_progress(), tasks=tasks))
    if as_json:
        print_json(result)
    else:
        for episode in result.episodes:
            click.echo(describe_episode(episode, is_trained=bool(trainer.config.algorithm)))
    sys.exit(0 if any(episode.rollout.status == "succeeded" for episode in result.episodes) else 1)
