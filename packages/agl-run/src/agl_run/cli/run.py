"""``agl run``: run an experiment to its end, or continue one that was stopped."""

import signal
import sys
from pathlib import Path
from types import FrameType

import click

from agl import PluginManager
from agl_run.cli.again import run_again
from agl_run.cli.context import pass_manager
from agl_run.cli.experiment import experiment_argument, make_trainer
from agl_run.cli.output import json_option, print_json
from agl_run.experiment.config import ExperimentConfig
from agl_run.experiment.fitting import FitResult
from agl_run.experiment.hints import MEMORY, command
from agl_run.experiment.progress import Quiet
from agl_run.experiment.store_url import located, without_password

STOPPED = 130
"""Exit status after an interrupt, by the shells' convention."""


@click.command()
@experiment_argument
@click.option("--resume", is_flag=True, help="Continue an experiment that was stopped, or was given more steps.")
@click.option("--fresh", is_flag=True, help="Start again an experiment that ran before.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@json_option
@pass_manager
def run(
    manager: PluginManager,
    file: Path,
    settings: tuple[str, ...],
    resume: bool,
    fresh: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run the experiment in FILE, a TOML file."""
    if resume and fresh:
        raise click.UsageError("--resume continues and --fresh starts again; give one")
    signal.signal(signal.SIGTERM, _interrupt)
    trainer = make_trainer(file, settings, manager=manager, progress=Quiet() if quiet or as_json else None)
    try:
        result = trainer.fit(resume=resume, fresh=fresh)
    except KeyboardInterrupt:
        again = run_again(file, settings, "--resume")
        click.echo(f"\nstopped; everything up to the last step is kept. Continue with: {again}", err=True)
        sys.exit(STOPPED)
    if as_json:
        print_json(result)
        return
    url = located(trainer.config.experiment.store, file.absolute().parent)
    click.echo(_summary(result, config=trainer.config, store_url=without_password(url)))


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _summary(result: FitResult, *, config: ExperimentConfig, store_url: str) -> str:
    lines = [f"finished {result.experiment} in {result.seconds:.0f} s"]
    if result.before is not None and result.after is not None:
        lines.append(f"validation reward: {result.before:.3f} before, {result.after:.3f} after")
        lines += _loss(result)
    lines += [f"{name}: {version}" for name, version in sorted(result.resources.items())]
    lines.append(f"metrics and checkpoints: {result.workdir}")
    if not store_url.startswith(MEMORY):
        lines.append(f"look at the runs with: {', '.join(_commands(result, store_url))}")
        lines += [f"take {name} with you: {text}" for name, text in _exports(config, store_url).items()]
    return "\n".join(lines)


def _commands(result: FitResult, store_url: str) -> list[str]:
    """Return the commands that show the run; a curve needs a step."""
    looks = [("runs",), ("show", "latest"), ("why", "latest"), ("export", "--output", "runs.jsonl")]
    curves = [("plot", result.experiment)] if any(result.steps.values()) else []
    return [command(*words, store_url=store_url) for words in (*looks, *curves)]


def _exports(config: ExperimentConfig, store_url: str) -> dict[str, str]:
    """Return the commands that show and write out what the algorithms tuned, by resource."""
    tuned = dict.fromkeys(name for algorithm in config.algorithm for name in algorithm.tunes)
    found: dict[str, str] = {}
    for name in tuned:
        weights = [("export", name, "--format", "model", "--output", f"{name}-model")]
        others = [("resources", "show", name), ("export", name, "--format", "json")]
        words = weights if name in config.policy else others
        found[name] = ", ".join(command(*each, store_url=store_url) for each in words)
    return found


def _loss(result: FitResult) -> list[str]:
    """Return the line that says so when the end is worse than the start or than the best version between."""
    if result.best is None or result.after is None or result.after >= result.best:
        return []
    when = f"after step {result.best_step}" if result.best_step else "before the first step"
    return [
        f"the end is worse than the best: validation reward {result.after:.3f} now, {result.best:.3f} {when}; "
        "agl resources list shows the versions of every step"
    ]
