"""``agl run``: run an experiment to its end, or continue one that was stopped."""

import errno
import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType

import click

from agl import PluginManager
from agl_inspect.records import after_step
from agl_inspect.stores import MEMORY, command, located, without_password
from agl_inspect.terminal import STOPPED, Modes, echo, json_option, pass_manager, print_fit, print_json
from agl_run.cli.again import run_again
from agl_run.cli.next_run import propose_for
from agl_run.cli.sync import sync
from agl_run.cli.watching import console_of
from agl_run.config.records import ExperimentConfig
from agl_run.display.progress import Quiet
from agl_run.run.fit import FitResult
from agl_run.run.resume import NothingMoreError
from agl_run.terminal import experiment_argument, make_trainer, ray_option


@click.command(cls=Modes, modes={"--sync": sync})
@experiment_argument
@click.option("--resume", is_flag=True, help="Continue an experiment that was stopped, or was given more steps.")
@click.option("--fresh", is_flag=True, help="Start again an experiment that ran before.")
@click.option("--next", "is_next", is_flag=True, help="Run with the parameters that comparable runs propose.")
@ray_option
@click.option("--console", "has_console", is_flag=True, help="Show the runs in a browser while this one lasts.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@json_option
@pass_manager
def run(
    manager: PluginManager,
    file: Path,
    settings: tuple[str, ...],
    resume: bool,
    fresh: bool,
    is_next: bool,
    ray_address: str | None,
    has_console: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run the experiment in FILE, a TOML file."""
    if resume and fresh:
        raise click.UsageError("--resume continues and --fresh starts again; give one")
    if is_next:
        settings = _proposed(manager, file, settings, as_json=as_json)
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
        signal.signal(signal.SIGHUP, _interrupt)
    progress = Quiet() if quiet or as_json else None
    trainer = make_trainer(file, settings, manager=manager, progress=progress, ray_address=ray_address)
    url = located(trainer.config.experiment.store, file.absolute().parent)
    try:
        with console_of(manager, url) if has_console else nullcontext() as address:
            if address:
                click.echo(f"console at {address} while this run lasts", err=True)
            result = trainer.fit(resume=resume, fresh=fresh)
    except NothingMoreError as error:  # a service that is started again must not count this as a failure
        _say_finished(trainer.config.experiment.name, str(error), as_json=as_json)
        return
    except KeyboardInterrupt:
        again = run_again(file, settings, "--resume", *(["--ray", ray_address] if ray_address else []))
        with _terminal_may_be_gone():
            click.echo(f"\nstopped; everything up to the last step is kept. Continue with: {again}", err=True)
        sys.exit(STOPPED)
    if as_json:
        print_json(result)
        return
    with _terminal_may_be_gone():
        click.echo(_summary(result, config=trainer.config, store_url=without_password(url)))


def _proposed(manager: PluginManager, file: Path, settings: tuple[str, ...], *, as_json: bool) -> tuple[str, ...]:
    """Return the settings with those of the proposed run, after printing how they were found."""
    found, proposed = propose_for(file, manager, settings)
    if not as_json:
        print_fit(found)
    words = [word for setting in (*settings, *proposed) for word in ("--set", setting)]
    click.echo(f"starting: {command('run', str(file), *words)}", err=True)
    sys.stdout.flush()
    return (*settings, *proposed)


def _say_finished(name: str, text: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"experiment": name, "nothing_run": text})
    else:
        with _terminal_may_be_gone():
            echo(f"nothing to do: {text}")


@contextmanager
def _terminal_may_be_gone() -> Generator[None]:
    """Print the last words, unless the terminal was closed while the run lasted; that changes no exit status."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):  # they are flushed when Python ends
            os.dup2(nowhere, stream.fileno())


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _summary(result: FitResult, *, config: ExperimentConfig, store_url: str) -> str:
    lines = [f"finished {result.experiment} in {result.seconds:.0f} s"]
    if result.after is not None:
        before = "" if result.before is None else f"{result.before:.3f} before, "  # its tasks may be given later
        lines.append(f"validation reward: {before}{result.after:.3f} after")
        lines += _loss(result)
    lines += [f"{name}: {version}" for name, version in sorted(result.resources.items())]
    lines.append(f"metrics and checkpoints: {result.workdir}")
    if not store_url.startswith(MEMORY):
        lines.append(f"look at the runs with: {', '.join(_commands(result, store_url))}")
        lines += [f"take {name} with you: {text}" for name, text in _exports(result, config, store_url).items()]
    return "\n".join(lines)


def _commands(result: FitResult, store_url: str) -> list[str]:
    """Return the commands that show the run; curves and suggestions need a step."""
    looks = [("runs",), ("show", "latest"), ("why", "latest"), ("data", "export", "--output", "runs.jsonl")]
    of_steps = (
        [("metrics", "--plot", result.experiment), ("metrics", "--suggest", result.experiment)]
        if any(result.steps.values())
        else []
    )
    return [command(*words, store_url=store_url) for words in (*looks, *of_steps)]


def _exports(result: FitResult, config: ExperimentConfig, store_url: str) -> dict[str, str]:
    """Return the commands that show and write out the live versions of what the algorithms tuned, by resource."""
    tuned = dict.fromkeys(name for algorithm in config.algorithm for name in algorithm.tunes)
    found: dict[str, str] = {}
    for name in tuned:
        live = result.resources[name]  # after a rollback an older one than commands take by themselves
        which = f"{name}@{live}"
        weights = [("data", "export", which, "--format", "model", "--output", f"{name}-model")]
        others = [("resources", "show", name, live), ("data", "export", which, "--format", "json")]
        words = weights if name in config.policy else others
        found[name] = ", ".join(command(*each, store_url=store_url) for each in words)
    return found


def _loss(result: FitResult) -> list[str]:
    """Return the line that says so when the end of the steps is worse than the start or than the best one between."""
    last, best = result.last, result.best
    if last is None or best is None or (last >= best and result.kept_step is None):
        return []
    if result.kept_step is None:
        text = f"the end is worse than the best: validation reward {last:.3f} now, {best:.3f} "
        return [f"{text}{after_step(result.best_step)}; agl resources list shows the versions of every step"]
    text = f"the last step was not the best: validation reward {last:.3f} after it, {result.after:.3f} "
    return [f"{text}{after_step(result.kept_step)}; the versions of then are live, and have the label best"]
