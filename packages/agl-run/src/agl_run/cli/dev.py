"""``agl dev``: run the agent on a few tasks and show its calls and rows; nothing is trained."""

import sys
from pathlib import Path

import click

from agl import PluginManager
from agl.schemas import Episode
from agl_run.cli.context import pass_manager
from agl_run.cli.experiment import experiment_argument, make_trainer
from agl_run.cli.output import json_option, print_json
from agl_run.control_characters import visible
from agl_run.experiment.blocking import run_blocking
from agl_run.experiment.fitting import dev_plan
from agl_run.experiment.progress import default_progress


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


def describe_episode(episode: Episode, *, is_trained: bool = True) -> str:
    """Describe a rollout in a few lines: its status, reward and calls, with the reasons of rejected ones."""
    rollout = episode.rollout
    reward = "no reward" if episode.reward is None else f"reward {episode.reward:g}"
    lines = [f"{rollout.rollout_id}: {rollout.status}, {reward}, {len(episode.rows)} rows"]
    if episode.attempt and episode.attempt.error:
        lines.append(f"  {episode.attempt.error.type}: {episode.attempt.error.message}")
    for call in episode.transitions:
        who = call.agent or "agent"
        prompt, response = len(call.prompt_ids) // 4, len(call.response_ids) // 4
        tokens = f"{prompt} + {response} tokens" if prompt or response else "no token ids"
        fate = f"rejected: {call.reject} {call.detail}".rstrip() if call.reject else f"row {call.branch}"
        if call.reject == "missing_token_ids" and not is_trained:
            fate = "recorded"
        lines.append(f"  {who} turn {call.turn}: {tokens}, {fate}")
    return visible("\n".join(lines))
