"""``agl run --sync``: write what W&B, MLflow or TensorBoard lack of a run."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from agl import PluginManager
from agl.contracts import ExperimentRecord, SinkOutcome, Store
from agl.errors import ConfigError, ExportError
from agl_inspect.ownership import is_owned
from agl_inspect.records.state import load_experiment
from agl_inspect.stores import without_password
from agl_inspect.terminal.opening import pass_manager
from agl_inspect.terminal.output import echo
from agl_run.deliver.sinking import Sinks, SinkSource
from agl_run.parts.build import build_sinks
from agl_run.plan import Plan
from agl_run.run.blocking import run_blocking
from agl_run.run.session import open_store, store_url_of
from agl_run.terminal import experiment_argument, make_trainer

if TYPE_CHECKING:
    from agl.schemas import Json


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


async def sync_plan(plan: Plan, *, run: int | None, say: Callable[[str], None]) -> None:
    """Give every sink all of a run, and wait for it.

    Args:
        plan: The experiment; its sinks and its configuration are those of now.
        run: The number of the run; ``None`` for the newest.
        say: Called with a line for each sink.

    Raises:
        ConfigError: The experiment names no sink, never ran in its store, has no such run, or runs now.
        ExportError: A sink did not take everything; the reason was logged.
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
            raise ConfigError(f"experiment {plan.name!r} has {record.run} runs; give --run a number up to {record.run}")
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
    """Return how a run ended, as far as the store knows."""
    saved = (await store.load_state(source.end_key)).get(source.end_key)
    if saved is not None:
        return msgspec.json.decode(saved, type=SinkOutcome)
    is_last = source.run == record.run
    versions: dict[str, Json] = {f"version/{name}": version for name, version in record.live.items()}
    is_finished = is_last and record.status == "finished"
    return SinkOutcome(status="finished" if is_finished else "stopped", summary=versions if is_last else {})
