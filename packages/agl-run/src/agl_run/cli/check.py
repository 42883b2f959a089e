"""``agl check``: check an experiment before it runs."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import click

from agl import PluginManager
from agl_inspect.terminal.opening import pass_manager
from agl_inspect.terminal.program import Modes
from agl_inspect.text import visible
from agl_run.checks.frameworks import unlisted_tracers
from agl_run.checks.notices import crowded_loop, served_from_disk, unused_credits
from agl_run.cli.forecast import forecast
from agl_run.cli.run import run_again
from agl_run.config.dataset import unkeyed_tasks
from agl_run.parts.build import check_components
from agl_run.parts.waiting import waiting_for
from agl_run.plan import Plan
from agl_run.terminal import experiment_argument, make_trainer, ray_option


@click.command(cls=Modes, modes={"--forecast": forecast})
@experiment_argument
@ray_option
@pass_manager
def check(manager: PluginManager, file: Path, settings: tuple[str, ...], ray_address: str | None) -> None:
    """Check the experiment in FILE: datasets, plugins, parameters, prompts, keys of providers, frameworks, models.

    Also adds up what it asks of a cluster. Starts nothing, and says on standard error what takes longer than a second.
    """
    with waiting_for(f"reading {file.name}, its tasks and its agent", say=_say):
        plan = make_trainer(file, settings, manager=manager, ray_address=ray_address).plan()
    # before components import frameworks
    warnings = [*unlisted_tracers(plan), *unkeyed_tasks(plan.train, plan.val), *unused_credits(plan)]
    if plan.fleet is None:
        warnings += crowded_loop(plan.config.runner.use, plan.config.runner.concurrency, key="runner.concurrency")
    asyncio.run(check_components(plan, say=_say))
    notes = [*asyncio.run(_layout(plan)), *served_from_disk(plan)]
    again = run_again(file, settings, *(["--ray", ray_address] if ray_address else []))
    click.echo(_summary(plan, warnings, notes=notes, again=again))


async def _layout(plan: Plan) -> list[str]:
    """Return the places of workers and algorithms on a cluster, as lines; none without one."""
    if plan.fleet is None:
        return []
    placed = [algorithm for algorithm in plan.config.algorithm if algorithm.resources is not None]
    with waiting_for("looking at the cluster", say=_say):
        return await plan.fleet.check(placed)


def _say(text: str) -> None:
    click.echo(visible(text), err=True)


def _summary(plan: Plan, warnings: Sequence[str], *, notes: Sequence[str], again: str) -> str:
    config = plan.config
    lines = [f"{plan.name}: {len(plan.train)} training and {len(plan.val)} validation tasks"]
    lines.append(f"agent: {plan.agent.path or plan.agent.identity}; runner {config.runner.use}")
    for algorithm in config.algorithm:
        agents = f", agents {algorithm.agents!r}" if algorithm.agents else ""
        lines.append(f"{algorithm.name}: {algorithm.use} tunes {', '.join(algorithm.tunes)}{agents}")
    lines += notes
    lines += [f"warning: {text}" for text in warnings]
    lines.append(f"no {'error' if warnings else 'problem'} found; start with: {again}")
    return "\n".join(lines)
