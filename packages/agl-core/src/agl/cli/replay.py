"""``agl replay``: run an agent again on a recorded rollout's task, with the recorded model answers.

No model, no key and no network are needed, so a run can be stepped through in a debugger, or a changed agent be
compared with what it did before. With ``--live`` the models answer anew.
"""

import asyncio
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import click
import msgspec

from agl.cli.context import pass_manager
from agl.cli.dev import describe_episode
from agl.cli.experiment import make_trainer
from agl.cli.opening import resolve_url, store_option, with_store
from agl.cli.output import json_option, print_json
from agl.cli.query import all_spans, deciding, find
from agl.cli.replay_server import ReplayServer
from agl.contracts import Store
from agl.errors import ConfigError
from agl.experiment.config import ExperimentConfig, PolicyConfig
from agl.experiment.once import record_command
from agl.experiment.progress import Quiet
from agl.experiment.trainer import DevResult, Trainer
from agl.plugins import PluginManager
from agl.schemas import Episode, ModelCall, Record, Rollout
from agl.train.transitions import build_episode


class Replayed(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The recorded run and the new one.

    Attributes:
        diverged: What the agent asked now and had not asked then; empty with ``--live``.
        unused: Recorded answers that the agent did not ask for.
    """

    recorded: Episode
    replayed: Episode
    diverged: list[str] = []
    unused: int = 0


@click.command()
@click.argument("rollout_id")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--live", is_flag=True, help="Let the experiment's models answer anew.")
@store_option
@json_option
@pass_manager
def replay(
    manager: PluginManager, rollout_id: str, file: Path | None, live: bool, store_url: str | None, as_json: bool
) -> None:
    """Run ROLLOUT_ID ("latest" for the newest) again with the agent of the experiment FILE.

    A rollout that agl exec recorded needs no FILE: its command runs again.
    """
    url = resolve_url(store_url)
    recorded, calls = with_store(manager, url, lambda store: _load(store, rollout_id))
    with ReplayServer(() if live else calls) as server:
        if file is not None:
            replayed = _with_agent(manager, file, recorded.rollout, None if live else server)
        else:
            replayed = _with_command(manager, url, recorded.rollout, None if live else server)
        result = Replayed(recorded=recorded, replayed=replayed, diverged=server.diverged, unused=server.unused)
    if as_json:
        print_json(result)
        return
    click.echo(f"recorded {describe_episode(recorded)}\nreplayed {describe_episode(replayed)}")
    for line in result.diverged:
        click.echo(f"diverged: the agent asked what it had not asked then: {line}")
    if result.unused:
        click.echo(f"diverged: {result.unused} recorded answers were not asked for")
    if not (live or result.diverged or result.unused):
        click.echo(f"the agent asked exactly what it asked then ({server.served} calls)")


async def _load(store: Store, rollout_id: str) -> tuple[Episode, list[ModelCall]]:
    rollout = await find(store, rollout_id)
    attempt = deciding(rollout, await store.attempts(rollout.rollout_id))
    spans = await all_spans(store, rollout.rollout_id)
    calls = [span.call for span in spans if span.call is not None]
    return build_episode(rollout, attempt, spans), calls


def _with_agent(manager: PluginManager, file: Path, rollout: Rollout, server: ReplayServer | None) -> Episode:
    trainer = make_trainer(file, (), manager=manager, progress=Quiet())
    if server is not None:
        config = _served_by(server, trainer.config)
        folder = file.absolute().parent
        trainer = Trainer.from_config(config, folder=folder, plugins=manager, progress=Quiet())
    result: DevResult = trainer.dev(train_dataset=[rollout.task], tasks=1)
    return result.episodes[0]


def _served_by(server: ReplayServer, config: ExperimentConfig) -> ExperimentConfig:
    """The experiment with every model served from the record, and nothing in training."""

    def policy(name: str, given: PolicyConfig) -> PolicyConfig:
        params = {"base_url": f"{server.url}/v1", "model": str(given.params.get("model") or name), "api_key_env": ""}
        return PolicyConfig(use="openai", aliases=given.aliases, params=params)

    policies = {name: policy(name, given) for name, given in config.policy.items()}
    return msgspec.structs.replace(config, policy=policies, algorithm=())


def _with_command(manager: PluginManager, url: str, rollout: Rollout, server: ReplayServer | None) -> Episode:
    command = rollout.task.get("command") if _is_object(rollout.task) else None
    if not command or not rollout.experiment.startswith("exec-"):
        raise ConfigError(
            f"the rollout {rollout.rollout_id} belongs to the experiment {rollout.experiment!r}; "
            f"name its file: agl replay {rollout.rollout_id} FILE"
        )
    upstream = f"{server.url}/v1" if server else os.environ.get("OPENAI_BASE_URL", "")
    with _environment(server):
        run = asyncio.run(record_command(list(command), manager=manager, store_url=url, upstream=upstream))
    return with_store(manager, url, lambda store: _load(store, run.rollout_id))[0]


@contextmanager
def _environment(server: ReplayServer | None) -> Generator[None]:
    """Points programs that read the usual variables at the server."""
    if server is None:
        yield
        return
    values = {"OPENAI_BASE_URL": f"{server.url}/v1", "ANTHROPIC_BASE_URL": server.url}
    values |= {name: os.environ.get(name, "replay") for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def _is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)
