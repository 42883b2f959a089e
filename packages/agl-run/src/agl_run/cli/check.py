"""The commands before a run, ``agl check`` with its forecast and ``agl dev``; they train nothing."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agl import PluginManager
from agl.errors import ConfigError
from agl.hints import count_of
from agl_inspect.stores import SQLITE, build_store, without_password
from agl_inspect.terminal.opening import pass_manager, resolve_url
from agl_inspect.terminal.output import echo, json_option, print_json
from agl_inspect.terminal.program import Modes
from agl_inspect.text import visible
from agl_run.checks.frameworks import unlisted_tracers
from agl_run.checks.notices import crowded_loop, unused_credits
from agl_run.config.dataset import unkeyed_tasks
from agl_run.config.learning import example_tasks, learner_of
from agl_run.config.sections import ExperimentConfig
from agl_run.display.progress import Quiet, default_progress
from agl_run.display.result_text import describe_episode
from agl_run.parts.build import check_components
from agl_run.parts.waiting import waiting_for
from agl_run.plan import Plan, store_url_of
from agl_run.run.blocking import run_blocking
from agl_run.run.trainer import Trainer
from agl_run.terminal import experiment_argument, make_trainer, ray_option, run_again

if TYPE_CHECKING:
    from agl_inspect.forecast.costs import Device
    from agl_inspect.forecast.models import ModelShape
    from agl_run.forecast.recorded import Material


@click.command("forecast")
@experiment_argument
@click.option(
    "--run/--no-run",
    "runs",
    default=None,
    help="Always or never run a trial; by default, run one if too little is recorded.",
)
@click.option(
    "-n",
    "--tasks",
    type=click.IntRange(min=1),
    help="Tasks of the trial; by default 8, and more until the tokens of a step are known well enough.",
)
@click.option(
    "--samples", type=click.IntRange(min=1), default=2, show_default=True, help="Rollouts of each task in the trial."
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    default=35.0,
    show_default=True,
    help="Time after which a trial starts no further task.",
)
@click.option("--device", help="Compute memory and time for this device, such as h100, a100-80, l40s or cpu.")
@click.option(
    "--model",
    help="The model for --device: a folder, config.json or TOML file, a size such as 7B, or layers=28,hidden=3584,...",
)
@json_option
@pass_manager
def forecast(
    manager: PluginManager,
    file: Path,
    settings: tuple[str, ...],
    runs: bool | None,
    tasks: int | None,
    samples: int,
    seconds: float,
    device: str | None,
    model: str | None,
    as_json: bool,
) -> None:
    """Forecast the costs of a run of FILE, and find faults before it pays for them.

    Tokens, rows, contexts and time of a rollout and of a step, the share of groups that will teach nothing by group
    size, the slowest part, and faults of the recordings. It reads the newest training rollouts that the experiment has
    recorded; where there are too few, it first runs a trial, which calls the model and trains nothing.
    With --device it also computes the memory and the time of a step there.
    """
    from agl_run.forecast.report import make_report
    from agl_run.forecast.text import as_lines
    from agl_run.forecast.trial import TrialSize, try_out

    made = make_trainer(file, settings, manager=manager).plan()
    target = _target(made, device, model)
    # Recorded rollouts cost nothing, so a trial runs only if there are too few.
    material = None if runs else asyncio.run(_recorded(made))
    if runs is None and material is not None and not material.source.is_enough:
        material = None
    if material is None and runs is False:
        raise ConfigError(
            f"no training rollout and no trial of {made.name!r} is recorded in {without_password(store_url_of(made))}; "
            "leave out --no-run, and a few rollouts are run"
        )
    size = TrialSize(tasks=tasks, samples=samples, seconds=seconds)
    progress = Quiet() if as_json else default_progress()  # its lines go where the JSON goes
    found = material or run_blocking(lambda: try_out(made, size, progress=progress))
    report = asyncio.run(make_report(made, found, target=target))
    if as_json:
        print_json(report)
        return
    for line in as_lines(report, store_url=store_url_of(made)):
        echo(line)


def _target(plan: Plan, device: str | None, model: str | None) -> "tuple[Device, ModelShape] | None":
    """Return the device and the model to compute costs for; without ``--model`` the model of a policy in training.

    Returns ``None`` without ``--device``.
    """
    from agl_inspect.forecast.costs import device_of
    from agl_inspect.forecast.models import shape_of_model

    if device is None:
        if model is not None:
            raise ConfigError(f"--model {model!r} says nothing without a device; add --device h100, or another one")
        return None
    found = device_of(device)  # before the model: its name is the shorter mistake
    if model is not None:
        return found, shape_of_model(model, folder=Path.cwd())
    folders = [str(plan.config.policy[name].params.get("model", "")) for name in sorted(plan.trained_policies())]
    known = [folder for folder in folders if folder and (plan.folder / folder / "config.json").is_file()]
    if not known:
        raise ConfigError(
            f"--device {device} needs --model, for no policy in training has its model in a folder here; give the "
            "folder of a model, its config.json, or a number of weights such as --model 7B"
        )
    return found, shape_of_model(known[0], folder=plan.folder)


async def _recorded(plan: Plan) -> "Material | None":
    """Read the experiment's recorded rollouts or trial for a forecast; return ``None`` if nothing is recorded."""
    from agl_run.forecast.recorded import find, read

    url = store_url_of(plan)
    if url.startswith("memory:"):
        return None
    # Opening it would make an empty file.
    if url.startswith(SQLITE) and not Path(url.removeprefix(SQLITE)).exists():
        return None
    store = build_store(plan.manager, resolve_url(url))
    try:
        found = await find(store, plan)
        return await read(store, plan, *found) if found else None
    finally:
        await store.close()


@click.command(cls=Modes, modes={"--forecast": forecast})
@experiment_argument
@ray_option
@pass_manager
def check(manager: PluginManager, file: Path, settings: tuple[str, ...], ray_address: str | None) -> None:
    """Check the experiment in FILE: datasets, plugins, parameters, prompts, keys of providers, frameworks, models.

    Also add up the resources that it needs from a cluster. Start nothing, and report checks that take longer than a
    second on standard error.
    """
    with waiting_for(f"reading {file.name}, its tasks and its agent", say=_say):
        plan = _plan(make_trainer(file, settings, manager=manager, ray_address=ray_address))
    # before components import frameworks
    warnings = [*unlisted_tracers(plan), *unkeyed_tasks(plan.train, plan.val), *unused_credits(plan)]
    if plan.fleet is None:
        warnings += crowded_loop(plan.config.runner.use, plan.config.runner.concurrency, key="runner.concurrency")
    asyncio.run(check_components(plan, say=_say))
    notes = asyncio.run(_layout(plan))
    verb = "learn" if _has_conversations(plan.config) else "run"
    again = run_again(file, settings, *(["--ray", ray_address] if ray_address else []), verb=verb)
    click.echo(_summary(plan, warnings, notes=notes, again=again))


def _plan(trainer: Trainer) -> Plan:
    """Return the plan; if its tasks are conversations, there are none yet, and examples stand in for them."""
    if trainer.config.learn:
        learner_of(trainer.config)
    examples = example_tasks(trainer.config.experiment) if _has_conversations(trainer.config) else ()
    return trainer.plan(None, *examples)


def _has_conversations(config: ExperimentConfig) -> bool:
    return bool(config.learn) and not (config.experiment.train or config.experiment.val)


async def _layout(plan: Plan) -> list[str]:
    """Return lines that say where workers and algorithms run on the cluster; an empty list without a fleet."""
    if plan.fleet is None:
        return []
    placed = [algorithm for algorithm in plan.config.algorithm if algorithm.resources is not None]
    with waiting_for("looking at the cluster", say=_say):
        return await plan.fleet.check(placed)


def _say(text: str) -> None:
    click.echo(visible(text), err=True)


def _summary(plan: Plan, warnings: Sequence[str], *, notes: Sequence[str], again: str) -> str:
    config = plan.config
    counts = f"{count_of(len(plan.train), 'training task')}, {count_of(len(plan.val), 'validation task')}"
    lines = [f"{plan.name}: {'its tasks are conversations' if _has_conversations(config) else counts}"]
    lines.append(f"agent: {plan.agent.path or plan.agent.identity}; runner {config.runner.use}")
    for algorithm in config.algorithm:
        agents = f", agents {algorithm.agents!r}" if algorithm.agents else ""
        lines.append(f"{algorithm.name}: {algorithm.use} tunes {', '.join(algorithm.tunes)}{agents}")
    lines += notes
    lines += [f"warning: {text}" for text in warnings]
    lines.append(f"no {'error' if warnings else 'problem'} found; start with: {again}")
    return "\n".join(lines)


@click.command()
@experiment_argument
@click.option("-n", "--tasks", type=click.IntRange(min=1), default=3, show_default=True, help="How many tasks to try.")
@json_option
@pass_manager
def dev(manager: PluginManager, file: Path, settings: tuple[str, ...], tasks: int, as_json: bool) -> None:
    """Run the agent of FILE on a few training tasks and show its calls.

    The exit status is 1 if no rollout succeeded.
    """
    from agl_run.run.fit import dev_plan

    trainer = make_trainer(file, settings, manager=manager)
    plan = trainer.plan()
    result = run_blocking(lambda: dev_plan(plan, progress=default_progress(), tasks=tasks))
    if as_json:
        print_json(result)
    else:
        for episode in result.episodes:
            click.echo(describe_episode(episode, is_trained=bool(trainer.config.algorithm), folder=plan.folder))
    sys.exit(0 if any(episode.rollout.status == "succeeded" for episode in result.episodes) else 1)
