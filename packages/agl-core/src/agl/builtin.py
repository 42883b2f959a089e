"""The core's own components, registered through the same hooks as everybody else's. Imports none of them."""

from collections.abc import Iterable

from agl.hookspecs import hookimpl
from agl.records import (
    CommandEntry,
    CreditEntry,
    LoggerEntry,
    PolicyEntry,
    RewardEntry,
    RunnerEntry,
    StoreEntry,
    TracerEntry,
)


@hookimpl
def agl_stores() -> Iterable[StoreEntry]:
    """Stores in memory and in one SQLite file."""
    yield StoreEntry(name="memory", factory="agl.stores.memory:MemoryStore", summary="in this process, not durable")
    yield StoreEntry(name="sqlite", factory="agl.stores.sqlite:SQLiteStore", summary="one durable file, the default")


@hookimpl
def agl_tracers() -> Iterable[TracerEntry]:
    """Tracers for OpenTelemetry spans and for model calls on the wire."""
    yield TracerEntry(
        name="otel",
        factory="agl.capture.otel:OtelTracer",
        summary="OpenTelemetry spans that end in a rollout",
        frameworks=("opentelemetry",),
    )
    yield TracerEntry(
        name="wire",
        factory="agl.capture.wire:WireTracer",
        summary="model calls through httpx, recorded in the process",
        frameworks=("httpx", "httpx2"),
    )


@hookimpl
def agl_rewards() -> Iterable[RewardEntry]:
    """The simplest reward there is."""
    yield RewardEntry(
        name="exact-match", factory="agl.train.rewards:ExactMatch", summary="1.0 when the final text is the answer"
    )


@hookimpl
def agl_credits() -> Iterable[CreditEntry]:
    """Credit per episode, per turn and per role."""
    yield CreditEntry(
        name="episode", factory="agl.train.credit:EpisodeCredit", summary="the episode's return to every call"
    )
    yield CreditEntry(name="turn", factory="agl.train.credit:TurnCredit", summary="discounted rewards per turn")
    yield CreditEntry(
        name="role", factory="agl.train.credit:RoleCredit", summary="rewards, baselines and discount per agent"
    )


@hookimpl
def agl_runners() -> Iterable[RunnerEntry]:
    """Runners on this machine."""
    yield RunnerEntry(
        name="async",
        factory="agl.run.local:AsyncRunner",
        summary="many attempts in this process",
        can_replay=True,
    )
    yield RunnerEntry(
        name="process",
        factory="agl.run.process:ProcessRunner",
        summary="isolated processes that can be killed",
        can_replay=True,
    )
    yield RunnerEntry(name="command", factory="agl.run.command:CommandRunner", summary="any program, once per attempt")


@hookimpl
def agl_policies() -> Iterable[PolicyEntry]:
    """Any endpoint that speaks OpenAI's API."""
    yield PolicyEntry(
        name="openai", factory="agl.run.policy:OpenAIPolicy", summary="an OpenAI-compatible endpoint, not trained"
    )


@hookimpl
def agl_loggers() -> Iterable[LoggerEntry]:
    """Metrics as JSON lines."""
    yield LoggerEntry(name="jsonl", factory="agl.experiment.loggers:JsonLines", summary="metrics as JSON lines")


@hookimpl
def agl_commands() -> Iterable[CommandEntry]:
    """The commands of an installation with the core alone."""
    yield CommandEntry(name="run", factory="agl.cli.run:run", summary="run an experiment")
    yield CommandEntry(name="worker", factory="agl.cli.worker:worker", summary="run a running experiment's rollouts")
    yield CommandEntry(name="check", factory="agl.cli.check:check", summary="check an experiment before it runs")
    yield CommandEntry(name="dev", factory="agl.cli.dev:dev", summary="try an agent on a few tasks, training nothing")
    yield CommandEntry(name="exec", factory="agl.cli.exec:exec_", summary="record any program once")
    yield CommandEntry(name="runs", factory="agl.cli.runs:runs", summary="list, remove and tidy recorded rollouts")
    yield CommandEntry(name="show", factory="agl.cli.show:show", summary="show one rollout as a tree")
    yield CommandEntry(name="why", factory="agl.cli.why:why", summary="say what became of every model call")
    yield CommandEntry(name="replay", factory="agl.cli.replay:replay", summary="run a recorded rollout again")
    yield CommandEntry(name="export", factory="agl.cli.export:export", summary="write recorded data as JSON lines")
    yield CommandEntry(
        name="resources", factory="agl.cli.resources:resources", summary="list, compare and promote resource versions"
    )
    yield CommandEntry(name="plugins", factory="agl.cli.plugins:plugins", summary="list, show and check plugins")
