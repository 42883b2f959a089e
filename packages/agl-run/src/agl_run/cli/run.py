"""``agl run``: run an experiment to its end, continue a stopped one, or send missing data of a run to its sinks."""

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import click
import msgspec

from agl import PluginManager
from agl.contracts import ExperimentRecord, SinkOutcome, Store
from agl.errors import AglError, ConfigError, ExportError
from agl_inspect.advice.past_runs import History, kind_of, parameters_of, runs_of_kind
from agl_inspect.advice.ranking import Fit
from agl_inspect.ownership import is_owned
from agl_inspect.records.names import MAX_NAME
from agl_inspect.records.state import load_experiment
from agl_inspect.records.validations import after_step, digest_of
from agl_inspect.stores import MEMORY, SQLITE, build_store, command, located, without_password
from agl_inspect.terminal.fits import fit_and_record, lacking, print_fit, settings_of
from agl_inspect.terminal.opening import pass_manager, with_store
from agl_inspect.terminal.output import STOPPED, echo, json_option, print_json
from agl_inspect.terminal.program import Modes
from agl_run.config.sections import ExperimentConfig
from agl_run.config.training_settings import training_settings
from agl_run.deliver.sinking import Sinks, SinkSource
from agl_run.display.progress import Quiet
from agl_run.parts.build import build_sinks
from agl_run.plan import Plan, store_url_of
from agl_run.run.blocking import run_blocking
from agl_run.run.fit import FitResult
from agl_run.run.resume import NothingMoreError
from agl_run.run.running_experiment import open_store
from agl_run.runners.bound_process import BoundProcess
from agl_run.terminal import experiment_argument, make_trainer, ray_option, run_again, store_of


@click.command("sync")
@experiment_argument
@click.option("--run", type=click.IntRange(min=1), metavar="N", help="The run, from 1; by default the newest.")
@pass_manager
def sync(manager: PluginManager, file: Path, settings: tuple[str, ...], run: int | None) -> None:
    """Send a run's missing data to FILE's exporters, such as W&B.

    While an experiment runs, it does this itself.
    """
    plan = make_trainer(file, settings, manager=manager).plan()
    run_blocking(lambda: sync_plan(plan, run=run, say=echo))


async def sync_plan(plan: Plan, *, run: int | None, say: Callable[[str], None]) -> None:
    """Send every sink all data of a run, and wait until the sinks have it.

    Args:
        plan: The experiment, with its current sinks and configuration.
        run: The number of the run; ``None`` for the newest.
        say: Called with a line for each sink.

    Raises:
        ConfigError: The experiment names no sink, never ran in its store, has no such run, or is running now.
        ExportError: A sink did not accept all data; the log has the reason.
    """
    if not build_sinks(plan):
        raise ConfigError(
            f'experiment {plan.name!r} names no system that shows runs; add [[exporter]] with use = "tensorboard", '
            '"mlflow" or "wandb"'
        )
    store, url = open_store(plan), store_url_of(plan)
    try:
        record = await load_experiment(store, plan.name)
        if record is None:
            raise ConfigError(f"experiment {plan.name!r} never ran in {without_password(url)}; run it first")
        if run is not None and run > record.run:
            raise ConfigError(f"the newest run of {plan.name!r} is {record.run}; give --run a number up to it")
        if await is_owned(store, plan.name):
            raise ConfigError(f"experiment {plan.name!r} runs now, and writes everything itself; wait for its end")
        source = SinkSource(plan=plan, store=store, store_url=without_password(url), run=run or record.run)
        async with Sinks(source, say=say, end_s=None) as sinks:
            sinks.end = await _end(store, source, record)
        if not sinks.has_all:
            raise ExportError("not everything was written; see the warnings above, and repeat the command")
    finally:
        await store.close()


async def _end(store: Store, source: SinkSource, record: ExperimentRecord) -> SinkOutcome:
    """Return the outcome that the store holds for a run; without one, derive it from the experiment's status."""
    saved = (await store.load_state(source.end_key)).get(source.end_key)
    if saved is not None:
        return msgspec.json.decode(saved, type=SinkOutcome)
    if source.run != record.run:
        return SinkOutcome(status="stopped")
    status = "finished" if record.status == "finished" else "stopped"
    return SinkOutcome(status=status, summary={f"version/{name}": live for name, live in record.live.items()})


@click.command(cls=Modes, modes={"--sync": sync})
@experiment_argument
@click.option("--resume", is_flag=True, help="Continue an experiment that was stopped, or that now has more steps.")
@click.option("--fresh", is_flag=True, help="Start an experiment again from its beginning.")
@click.option("--next", "is_next", is_flag=True, help="Use the parameters that agl metrics --rank proposes.")
@ray_option
@click.option("--console", "has_console", is_flag=True, help="Show the runs in a browser during this run.")
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
    # A service manager stops a process with SIGTERM; the run then saves its state, as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
        signal.signal(signal.SIGHUP, signal.default_int_handler)
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
            click.echo(
                f"\nstopped{_left(manager, url, trainer.config.experiment.name, resume=resume, again=again)}", err=True
            )
        sys.exit(STOPPED)
    if as_json:
        print_json(result)
        return
    with _terminal_may_be_gone():
        click.echo(_summary(result, config=trainer.config, store_url=without_password(url)))


def _left(manager: PluginManager, url: str, name: str, *, resume: bool, again: str) -> str:
    """Say what is left of a run that was stopped, as the store knows it."""
    nothing = " before anything was saved; there is nothing to continue"
    if url.startswith(SQLITE) and not Path(url.removeprefix(SQLITE)).exists():
        return nothing
    with suppress(AglError):  # a store that does not answer now may hold the run
        record = with_store(manager, url, lambda store: load_experiment(store, name))
        if record is None:
            return nothing
        if record.status == "finished" and not resume:  # a resume may have been about to run further steps
            return f"; experiment {name!r} is finished, and there is nothing to continue"
    return f"; everything up to the last step is kept. Continue with: {again}"


def _proposed(manager: PluginManager, file: Path, settings: tuple[str, ...], *, as_json: bool) -> tuple[str, ...]:
    """Print the proposal for the next run, and return ``settings`` followed by the proposed settings."""
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
    """Ignore the write error of a terminal that was closed during the run, so that the exit status stays the same."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        # Python flushes both streams when it exits, and would fail again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):  # they are flushed when Python ends
            os.dup2(nowhere, stream.fileno())


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
    """Return commands that show the run; commands for curves and suggestions are included only if the run has steps."""
    looks = [("runs",), ("show", "latest"), ("why", "latest"), ("data", "export", "--output", "runs.jsonl")]
    of_steps = (
        [("metrics", "--plot", result.experiment), ("metrics", "--suggest", result.experiment)]
        if any(result.steps.values())
        else []
    )
    return [command(*words, store_url=store_url) for words in (*looks, *of_steps)]


def _exports(result: FitResult, config: ExperimentConfig, store_url: str) -> dict[str, str]:
    """Map each resource that an algorithm tuned to the commands that show or export its live version."""
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
    """Return a warning if the last validation reward was below the highest one, else an empty list."""
    last, best = result.last, result.best
    if last is None or best is None or (last >= best and result.kept_step is None):
        return []
    if result.kept_step is None:
        text = f"the last validation reward, {last:.3f}, is below the highest one, {best:.3f} "
        return [f"{text}{after_step(result.best_step)}; agl resources list shows the versions of every step"]
    text = f"the last step was not the best: validation reward {last:.3f} after it, {result.after:.3f} "
    return [f"{text}{after_step(result.kept_step)}; the versions of then are live, and have the label best"]


@contextmanager
def console_of(manager: PluginManager, store_url: str) -> Generator[str]:
    """Serve the console over a store while the block runs; yields the console's address.

    The console is a process of its own, so that reading the store takes no time of the trainer. It ends with this
    process, even after ``kill -9``.

    Raises:
        UnknownComponentError: ``agl-console`` is not installed; the message says how to install it.
        ConfigError: No other process can read the store, or the console did not start.
    """
    manager.command("console")
    if store_url.startswith(MEMORY):
        raise ConfigError(
            f"--console reads the store from another process, and {store_url} exists in this one alone; write "
            'store = "sqlite:///runs/agl.db" under [experiment], or leave --console away'
        )
    console = run_blocking(lambda: _start_console(manager, store_url))
    try:
        said = run_blocking(lambda: _first_line(console))
        if not said.startswith("console at "):
            raise ConfigError(
                "the console did not start; its own message stands above, and agl run works without --console"
            )
        yield said.removeprefix("console at ").partition(" ")[0]
    finally:
        run_blocking(console.stop)


async def _start_console(manager: PluginManager, store_url: str) -> BoundProcess:
    if store_url.startswith(SQLITE) and not Path(store_url.removeprefix(SQLITE)).exists():
        store = build_store(manager, store_url)  # makes the file that the console reads and the run is about to fill
        await store.cursor()
        await store.close()
    words = [sys.executable, "-m", "agl", "console", store_url]
    environment = {**os.environ, **manager.worker_env()}
    return await BoundProcess.start(
        words, environment=environment, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )


async def _first_line(console: BoundProcess) -> str:
    return (await console.process.stdout.readline()).decode() if console.process.stdout is not None else ""


NEXT = "-next-"
"""The text between the experiment's name and the number in the name of a proposed run."""


def propose_for(file: Path, manager: PluginManager, settings: tuple[str, ...]) -> tuple[Fit, tuple[str, ...]]:
    """Fit a model to past runs that are comparable with the file's run; return the fit and settings for ``--set``.

    Raises:
        ConfigError: There is nothing to propose, or the file sets parameters that the proposed run leaves out.
    """
    plan = make_trainer(file, settings, manager=manager).plan()
    store_url = store_of(plan.config, file)

    async def read(store: Store) -> tuple[Fit, str]:
        history = await _history_of_plan(store, plan)
        found = await fit_and_record(store, history)
        names = {record.name for record in await store.experiments()}
        return found, _new_name(plan.name, names)

    found, name = with_store(manager, store_url, read)
    if not found.next:
        why = lacking(found) if found.missing else " ".join(found.notes)
        raise ConfigError(f"no next run can be proposed: {why}")
    _check_left_out(plan, found.next, file=str(file))
    return found, (f"experiment.name={name}", *settings_of(found.next))


async def _history_of_plan(store: Store, plan: Plan) -> History:
    """Read the past runs that are comparable with the planned run."""
    val = plan.val[: plan.config.experiment.validation_limit or None]
    settings = {each.name: training_settings(plan.config, each) for each in plan.config.algorithm}
    kind = kind_of(settings, agent=plan.agent.identity, train=digest_of(plan.train), val=digest_of(val))
    return await runs_of_kind(store, kind)


def _check_left_out(plan: Plan, proposed: Mapping[str, str | None], *, file: str) -> None:
    """Refuse a proposal that leaves out a parameter which the file sets, because ``--set`` cannot remove a key."""
    own = parameters_of({each.name: training_settings(plan.config, each) for each in plan.config.algorithm})
    fixed = [key for key, text in proposed.items() if text is None and own.get(key, "null") != "null"]
    if fixed:
        raise ConfigError(
            f"the proposed run leaves out {' and '.join(fixed)}, which {file} sets; remove it there, and start again"
        )


def _new_name(name: str, taken: set[str]) -> str:
    """Return a name for the next run that is in no experiment's use: the experiment's name, ``-next-`` and a number."""
    base = name.partition(NEXT)[0][: MAX_NAME - len(NEXT) - 5]
    # Among one more number than there are names, one is free.
    return next(f"{base}{NEXT}{number}" for number in range(1, len(taken) + 2) if f"{base}{NEXT}{number}" not in taken)
