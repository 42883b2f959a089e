"""Registers the components of this distribution by name, without importing them."""

from collections.abc import Iterable
from pathlib import Path

from agl import hookimpl
from agl.contracts import (
    CommandEntry,
    ExporterEntry,
    PolicyEntry,
    RewardEntry,
    RunnerEntry,
    StepReport,
    StoreEntry,
    TracerEntry,
)


@hookimpl
def agl_stores() -> Iterable[StoreEntry]:
    """Register the store in one SQLite file."""
    yield StoreEntry(name="sqlite", factory="agl_run.sqlite:SQLiteStore", summary="one durable file, the default")


@hookimpl
def agl_tracers() -> Iterable[TracerEntry]:
    """Register what is always on: the watch on HTTP clients other than httpx, and the spans of frameworks' own."""
    yield TracerEntry(
        name="unrecorded",
        factory="agl_run.unrecorded:UnrecordedCalls",
        summary="counts model calls through urllib, requests, urllib3, botocore and aiohttp that nothing records",
    )
    yield TracerEntry(
        name="own-spans",
        factory="agl_run.own_spans:OwnSpans",
        summary="switches on the spans of pydantic-ai and Agent Framework, which otel records",
    )


@hookimpl
def agl_rewards() -> Iterable[RewardEntry]:
    """Register the simplest reward there is."""
    yield RewardEntry(
        name="exact-match", factory="agl_run.exact_match:ExactMatch", summary="1.0 when the final text is the answer"
    )


@hookimpl
def agl_runners() -> Iterable[RunnerEntry]:
    """Register the runners on this machine."""
    yield RunnerEntry(
        name="async",
        factory="agl_run.runners.local:AsyncRunner",
        summary="many attempts in this process",
        can_replay=True,
    )
    yield RunnerEntry(
        name="process",
        factory="agl_run.runners.process:ProcessRunner",
        summary="isolated processes that can be killed",
        can_replay=True,
    )
    yield RunnerEntry(
        name="command", factory="agl_run.runners.command:CommandRunner", summary="any program, once per attempt"
    )


@hookimpl
def agl_policies() -> Iterable[PolicyEntry]:
    """Register the policy for any endpoint that speaks OpenAI's API."""
    yield PolicyEntry(
        name="openai",
        factory="agl_run.runners.policy:OpenAIPolicy",
        summary="an OpenAI-compatible endpoint, not trained",
    )


@hookimpl
def agl_exporters() -> Iterable[ExporterEntry]:
    """Register the sink that tells a web address what happens to a run."""
    yield ExporterEntry(
        name="webhook",
        factory="agl_run.webhook:WebhookSink",
        summary="findings, a collapse, a failure and the end of a run, as JSON to a web address",
    )


@hookimpl
def agl_step_finished(run: int, algorithm: str, report: StepReport, experiment_step: int, workdir: Path) -> None:
    """Append the step's metrics to ``metrics.jsonl`` in the work directory."""
    from agl_run.experiment.metrics_file import append_metrics

    append_metrics(algorithm, report, workdir, run=run, experiment_step=experiment_step)


@hookimpl
def agl_commands() -> Iterable[CommandEntry]:
    """Register the commands that run, record and inspect."""
    yield CommandEntry(name="init", factory="agl_run.cli.init:init", summary="write a small experiment that runs")
    yield CommandEntry(name="run", factory="agl_run.cli.run:run", summary="run an experiment")
    yield CommandEntry(
        name="worker", factory="agl_run.cli.worker:worker", summary="run a running experiment's rollouts"
    )
    yield CommandEntry(
        name="workers", factory="agl_run.cli.workers:workers", summary="list trainers and workers, and if they live"
    )
    yield CommandEntry(name="check", factory="agl_run.cli.check:check", summary="check an experiment before it runs")
    yield CommandEntry(
        name="dev", factory="agl_run.cli.dev:dev", summary="try an agent on a few tasks, training nothing"
    )
    yield CommandEntry(
        name="try", factory="agl_run.cli.try_:try_", summary="compare versions or edits of a prompt on a few tasks"
    )
    yield CommandEntry(
        name="plan", factory="agl_run.cli.plan:plan", summary="forecast the steps of a run and find its faults"
    )
    yield CommandEntry(name="exec", factory="agl_run.cli.exec:exec_", summary="record any program once")
    yield CommandEntry(name="runs", factory="agl_run.cli.runs:runs", summary="list, remove and tidy recorded rollouts")
    yield CommandEntry(name="show", factory="agl_run.cli.show:show", summary="show one rollout as a tree")
    yield CommandEntry(name="why", factory="agl_run.cli.why:why", summary="explain the outcome of every model call")
    yield CommandEntry(
        name="metrics", factory="agl_run.cli.metrics:metrics", summary="print the numbers that algorithms logged"
    )
    yield CommandEntry(
        name="sync", factory="agl_run.cli.sync:sync", summary="write what W&B, MLflow or TensorBoard lack of a run"
    )
    yield CommandEntry(name="plot", factory="agl_run.cli.metrics:plot", summary="draw metrics over the steps")
    yield CommandEntry(
        name="suggest", factory="agl_run.cli.suggest:suggest", summary="say what keeps an experiment from learning"
    )
    yield CommandEntry(name="sql", factory="agl_run.cli.sql:sql", summary="query everything that is recorded")
    yield CommandEntry(name="replay", factory="agl_run.cli.replay:replay", summary="run a recorded rollout again")
    yield CommandEntry(
        name="fork", factory="agl_run.cli.fork:fork", summary="run a recorded rollout anew from one call"
    )
    yield CommandEntry(
        name="reward", factory="agl_run.cli.reward:reward", summary="score recorded rollouts again, running no agent"
    )
    yield CommandEntry(name="export", factory="agl_run.cli.export:export", summary="write recorded data as JSON lines")
    yield CommandEntry(
        name="resources",
        factory="agl_run.cli.resources:resources",
        summary="list, compare and promote resource versions",
    )
    yield CommandEntry(name="plugins", factory="agl_run.cli.plugins:plugins", summary="list, show and check plugins")
