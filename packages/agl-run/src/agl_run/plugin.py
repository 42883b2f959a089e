"""Registers the components of this distribution by name, without importing them."""

import time
from collections.abc import Iterable
from pathlib import Path

from agl import hookimpl
from agl.contracts import (
    CommandEntry,
    PolicyEntry,
    RewardEntry,
    RunnerEntry,
    StepReport,
    TracerEntry,
)
from agl.schemas import to_json


@hookimpl
def agl_tracers() -> Iterable[TracerEntry]:
    """Register the tracers that are always on: unrecorded calls of HTTP clients, and frameworks' own spans."""
    yield TracerEntry(
        name="unrecorded",
        factory="agl_run.tracers.unrecorded:UnrecordedCalls",
        summary="counts model calls through urllib, requests, urllib3, botocore and aiohttp that nothing records",
    )
    yield TracerEntry(
        name="own-spans",
        factory="agl_run.tracers.module_tracer:OwnSpans",
        summary="switches on the spans of pydantic-ai and Agent Framework, which otel records",
    )


@hookimpl
def agl_rewards() -> Iterable[RewardEntry]:
    """Register the reward that compares an agent's final text with the answer."""
    yield RewardEntry(
        name="exact-match",
        factory="agl_run.builtin:ExactMatch",
        summary="1.0 when the final text is the answer",
    )


@hookimpl
def agl_runners() -> Iterable[RunnerEntry]:
    """Register the runners that run attempts on this machine."""
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
        factory="agl_run.builtin:OpenAIPolicy",
        summary="an OpenAI-compatible endpoint, not trained",
    )
    yield PolicyEntry(
        name="past",
        factory="agl_run.run.opponents:PastPolicy",
        summary="past versions of a policy in training, as its opponent",
    )


@hookimpl
def agl_step_finished(run: int, algorithm: str, report: StepReport, experiment_step: int, workdir: Path) -> None:
    """Append every metric of the step to ``metrics.jsonl`` in the work directory, one JSON object per line."""
    place = {"time": time.time(), "run": run, "algorithm": algorithm, "step": report.step}
    place |= {"experiment_step": experiment_step}
    lines = [to_json({**place, "name": name, "value": value}) + b"\n" for name, value in report.metrics.items()]
    workdir.mkdir(parents=True, exist_ok=True)
    # One append per step, so that a kill cuts at most the last line.
    with open(workdir / "metrics.jsonl", "ab") as file:
        file.writelines(lines)


@hookimpl
def agl_commands() -> Iterable[CommandEntry]:
    """Register the commands that write, check and run experiments or programs."""
    yield CommandEntry(name="init", factory="agl_run.cli.init:init", summary="write a small experiment that runs")
    yield CommandEntry(
        name="check", factory="agl_run.cli.check:check", summary="check or forecast an experiment before it runs"
    )
    yield CommandEntry(
        name="dev", factory="agl_run.cli.check:dev", summary="try an agent on a few tasks, training nothing"
    )
    yield CommandEntry(name="run", factory="agl_run.cli.run:run", summary="run an experiment")
    yield CommandEntry(
        name="worker", factory="agl_run.cli.worker:worker", summary="run rollouts of an experiment that is under way"
    )
    yield CommandEntry(name="exec", factory="agl_run.cli.exec:exec_", summary="run any program once and record it")
