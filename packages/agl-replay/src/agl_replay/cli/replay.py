"""``agl replay``: run an agent again on a recorded rollout's task, with the recorded model answers.

A replay needs no model, no key and no network, so that a run can be stepped through in a debugger, or a changed agent
can be compared with its recorded run. Prompts that were tuned, tried or published are taken from the recorded rollout.
The new rollout belongs to a separate experiment ``NAME-replay``. With ``--live`` the experiment's models answer.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import click
import msgspec

from agl import PluginManager, semconv
from agl.contracts import Store
from agl.episodes import build_episode
from agl.errors import ConfigError
from agl.hints import count_of
from agl.schemas import Episode, JsonResource, ModelCall, PromptTemplate, Record, Resource, Rollout, Span
from agl.stores import all_spans
from agl_inspect.rollouts.conversations import difference
from agl_inspect.stores import located
from agl_inspect.terminal.opening import complete_rollout, pass_manager, resolve_url, store_option, with_store
from agl_inspect.terminal.output import echo, json_option, print_json
from agl_inspect.terminal.program import Modes
from agl_inspect.terminal.query import deciding, find, read_one
from agl_inspect.versions import is_of_file
from agl_replay.cli.align import align
from agl_replay.cli.fork import SUFFIX, fork
from agl_replay.cli.replay_server import ReplayServer
from agl_replay.cli.score import score
from agl_run import ExperimentConfig, PolicyConfig, Quiet, ResourceConfig, Trainer, load_config, policy
from agl_run.engine import describe_episode, record_command
from agl_run.terminal import read_experiment, store_of


class ComparedRun(Record, frozen=True, kw_only=True, omit_defaults=False):
    """One side of a comparison of two runs: the episode, the agent's output, and the number of model calls."""

    episode: Episode
    output: Any = None
    calls: int = 0


def side_of(episode: Episode, spans: Sequence[Span]) -> ComparedRun:
    """Return a recorded run in the form that :func:`compare` takes."""
    outputs = [span.attributes[semconv.OUTPUT] for span in spans if semconv.OUTPUT in span.attributes]
    calls = sum(span.call is not None for span in spans)
    return ComparedRun(episode=episode, output=outputs[-1] if outputs else None, calls=calls)


def compare(then: ComparedRun, now: ComparedRun) -> tuple[list[str], list[str]]:
    """Return the names of the values, such as ``reward``, that are equal in both runs, and a line for each other."""
    pairs = {name: (read(then), read(now)) for name, read in _READ.items()}
    equal = [name for name, (old, new) in pairs.items() if old == new]
    changed = [f"{name} {difference(old, new)}" for name, (old, new) in pairs.items() if old != new]
    return equal, changed


def _error(side: ComparedRun) -> str:
    error = side.episode.attempt.error if side.episode.attempt else None
    return f"{error.type}: {error.message}" if error else ""


_READ: Mapping[str, Callable[[ComparedRun], Any]] = {
    "status": lambda side: side.episode.rollout.status,
    "error": _error,
    "reward": lambda side: side.episode.reward,
    "output": lambda side: side.output,
    "calls": lambda side: side.calls,
}


class ReplayComparison(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A recorded run compared with its replay.

    Attributes:
        equal: Names of the parts that stayed equal.
        changed: A line for each part that changed.
        diverged: Descriptions of requests that the recorded run did not make; empty with ``--live``.
        unused: Number of recorded answers that the agent did not request.
    """

    recorded: ComparedRun
    replayed: ComparedRun
    equal: list[str] = []
    changed: list[str] = []
    diverged: list[str] = []
    unused: int = 0

    @property
    def is_same(self) -> bool:
        """True if nothing changed."""
        return not (self.changed or self.diverged or self.unused)


@dataclass(frozen=True, kw_only=True)
class _ReplayedRollout:
    """The rollout to replay, with the calls, and with the resources that are not from the experiment's file."""

    side: ComparedRun
    calls: list[ModelCall]
    resources: dict[str, Resource]

    @property
    def rollout(self) -> Rollout:
        return self.side.episode.rollout


@click.command(cls=Modes, modes={"--align": align, "--fork": fork, "--score": score})
@click.argument("rollout_id", shell_complete=complete_rollout)
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--live", is_flag=True, help="Let the experiment's models answer, instead of the recorded answers.")
@store_option
@json_option
@pass_manager
def replay(
    manager: PluginManager, rollout_id: str, file: Path | None, live: bool, store_url: str | None, as_json: bool
) -> None:
    """Run ROLLOUT_ID again with the agent of the experiment FILE.

    A unique beginning of an id is enough; "latest" is the newest rollout. A rollout that agl exec recorded needs no
    FILE: its command runs again. The exit status is 1 if something changed.
    """
    url = store_of(load_config(file), file) if file is not None and not store_url else resolve_url(store_url)
    past = with_store(manager, url, lambda store: _load(store, rollout_id))
    with ReplayServer(() if live else past.calls) as server:
        if file is not None:
            now = _with_agent(manager, file, url, past, None if live else server)
        else:
            now = _with_command(manager, url, past.rollout, None if live else server)
        equal, changed = compare(past.side, now)
        result = ReplayComparison(
            recorded=past.side,
            replayed=now,
            equal=equal,
            changed=changed,
            diverged=server.diverged,
            unused=server.unused,
        )
    if as_json:
        print_json(result)
    else:
        _print(result, served=None if live else server.served)
    sys.exit(0 if result.is_same else 1)


def _print(result: ReplayComparison, *, served: int | None) -> None:
    echo(f"recorded {describe_episode(result.recorded.episode)}")
    echo(f"replayed {describe_episode(result.replayed.episode)}")
    for line in result.diverged:
        echo(f"diverged: the agent made a request that was not recorded: {line}")
    if result.unused:
        echo(f"diverged: the agent did not ask for {count_of(result.unused, 'recorded answer')}")
    if served is not None and not (result.diverged or result.unused):
        echo(f"the agent made exactly the recorded requests ({count_of(served, 'call')})")
    for line in result.changed:
        echo(f"changed: {line}")
    if result.equal:
        echo(f"equal: {', '.join(result.equal)}")


async def _load(store: Store, rollout_id: str) -> _ReplayedRollout:
    rollout = await find(store, rollout_id)
    recording = await read_one(store, rollout.rollout_id)
    attempt, spans = deciding(rollout, recording.attempts), recording.spans
    pinned = [await store.resource(name, version) for name, version in rollout.resources.items()]
    return _ReplayedRollout(
        side=side_of(build_episode(rollout, attempt, spans), spans),
        calls=[span.call for span in spans if span.call is not None],
        resources={version.name: version.resource for version in pinned if not is_of_file(version)},
    )


def _with_agent(
    manager: PluginManager, file: Path, url: str, past: _ReplayedRollout, server: ReplayServer | None
) -> ComparedRun:
    store = located(url, Path.cwd())
    config, plugins = read_experiment(file, (f"experiment.store={store}",), manager=manager)
    if server is not None:
        config = _served_by(server, config, past.resources)
    trainer = Trainer.from_config(config, folder=file.absolute().parent, plugins=plugins, progress=Quiet())
    name = trainer.config.experiment.name.removesuffix(SUFFIX) + SUFFIX
    result = trainer.dev(train_dataset=[past.rollout.task], tasks=1, record_as=name)
    episode = result.episodes[0]
    spans = with_store(manager, store, lambda opened: all_spans(opened, episode.rollout.rollout_id))
    return side_of(episode, spans)


def _served_by(server: ReplayServer, config: ExperimentConfig, resources: Mapping[str, Resource]) -> ExperimentConfig:
    """Return a copy of the experiment whose models and resources come from the recording, and which does not train."""

    def replayed(name: str, given: PolicyConfig) -> PolicyConfig:
        model = str(given.params.get("model") or name)
        return policy("openai", base_url=f"{server.url}/v1", model=model, api_key_env="", aliases=given.aliases)

    section = config.experiment
    recorded = {
        name: ResourceConfig.of(resource)
        for name, resource in resources.items()
        if isinstance(resource, PromptTemplate | JsonResource)  # models and weights are served from the record
    }
    return msgspec.structs.replace(
        config,
        experiment=msgspec.structs.replace(
            section,
            name=f"{section.name}{SUFFIX}",
            workdir=f"{section.workdir}{SUFFIX}" if section.workdir else "",
            train="",
            val="",
            validate_every=0,
        ),
        policy={name: replayed(name, given) for name, given in config.policy.items()},
        resource={**config.resource, **recorded},
        algorithm=(),
    )


def _with_command(manager: PluginManager, url: str, rollout: Rollout, server: ReplayServer | None) -> ComparedRun:
    command = rollout.task.get("command") if _is_object(rollout.task) else None
    if not command or not rollout.experiment.startswith("exec-"):
        raise ConfigError(
            f"the rollout {rollout.rollout_id} belongs to the experiment {rollout.experiment!r}; "
            f"name its file: agl replay {rollout.rollout_id} FILE"
        )
    upstream = f"{server.url}/v1" if server else os.environ.get("OPENAI_BASE_URL", "")
    with _environment(server):
        run = asyncio.run(record_command(list(command), manager=manager, store_url=url, upstream=upstream))
    return with_store(manager, url, lambda store: _load(store, run.rollout_id)).side


@contextmanager
def _environment(server: ReplayServer | None) -> Generator[None]:
    """Set the usual variables for a model's address and key within the block, so that programs call the server."""
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
