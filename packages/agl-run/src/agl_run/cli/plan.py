"""``agl plan``: forecast the steps of a run from recorded rollouts or a small trial, and find faults."""

import asyncio
import random
from pathlib import Path

import click

from agl import PluginManager
from agl.errors import ConfigError
from agl_run.cli.context import pass_manager
from agl_run.cli.experiment import experiment_argument, make_trainer
from agl_run.cli.opening import resolve_url
from agl_run.cli.output import echo, json_option, print_json
from agl_run.cli.plan_report import as_lines
from agl_run.control_characters import visible
from agl_run.experiment.blocking import run_blocking
from agl_run.experiment.plan import TRIAL, Plan
from agl_run.experiment.progress import default_progress
from agl_run.experiment.session import store_url_of
from agl_run.experiment.store_url import SQLITE, without_password
from agl_run.experiment.trial import run_tasks, trial
from agl_run.planning.recorded import Material, find, find_trial, read
from agl_run.planning.report import make_report
from agl_run.store_contract import build_store


@click.command()
@experiment_argument
@click.option(
    "--run/--no-run",
    "runs",
    default=None,
    help="Always run a trial, or never; by default where too little is recorded.",
)
@click.option("-n", "--tasks", type=click.IntRange(min=1), default=8, show_default=True, help="Tasks of the trial.")
@click.option(
    "--samples", type=click.IntRange(min=1), default=2, show_default=True, help="Rollouts of each task in the trial."
)
@json_option
@pass_manager
def plan(
    manager: PluginManager,
    file: Path,
    settings: tuple[str, ...],
    runs: bool | None,
    tasks: int,
    samples: int,
    as_json: bool,
) -> None:
    """Forecast what a run of FILE costs, and find faults that it would pay for.

    Tokens, rows, contexts and time of a rollout and of a step, the share of groups that will teach nothing by group
    size, the slowest part, and faults of the recordings. It reads the newest training rollouts that the experiment has
    recorded; where there are too few, it first runs a trial, which calls the model and trains nothing.
    """
    made = make_trainer(file, settings, manager=manager).plan()
    material = None if runs else asyncio.run(_recorded(made))
    if runs is None and material is not None and not material.source.is_enough:
        material = None
    if material is None and runs is False:
        raise ConfigError(
            f"no training rollout and no trial of {made.name!r} is recorded in {without_password(store_url_of(made))}; "
            "leave out --no-run, and a few rollouts are run"
        )
    found = material or run_blocking(lambda: _tried(made, tasks=tasks, samples=samples))
    report = asyncio.run(make_report(made, found))
    if as_json:
        print_json(report)
        return
    for line in as_lines(report, store_url=store_url_of(made)):
        echo(line)


async def _recorded(plan: Plan) -> Material | None:
    """Read the rollouts that are recorded; ``None`` without any."""
    url = store_url_of(plan)
    if url.startswith("memory:"):
        return None
    if url.startswith(SQLITE) and not Path(url.removeprefix(SQLITE)).exists():
        return None
    store = build_store(plan.manager, resolve_url(url))
    try:
        found = await find(store, plan)
        return await read(store, plan, *found) if found else None
    finally:
        await store.close()


async def _tried(plan: Plan, *, tasks: int, samples: int) -> Material:
    """Run the trial and read it."""
    known = plan.train or plan.val
    draw = random.Random(plan.config.experiment.seed)  # any tasks, and the same ones again
    chosen = draw.sample(known, k=min(tasks, len(known)))
    count = len(chosen)
    click.echo(
        visible(
            f"running {count * samples} rollouts ({count} tasks, {samples} times each), which call the model; "
            "Ctrl-C ends them"
        ),
        err=True,
    )
    async with trial(plan, record_as=f"{plan.name}{TRIAL}", progress=default_progress()) as driver:
        await run_tasks(driver, chosen, samples=samples, mode="train")
        store = driver.session.store
        return await read(store, plan, *await find_trial(store, plan))
