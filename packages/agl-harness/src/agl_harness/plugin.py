"""Registers ``agl harness``, the runner ``harness``, and the rewards that run tests."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import CommandEntry, RewardEntry, RunnerEntry


@hookimpl
def agl_commands() -> Iterable[CommandEntry]:
    """Register ``agl harness``."""
    yield CommandEntry(
        name="harness", factory="agl_harness.command:harness", summary="list, install, check and run coding harnesses"
    )


@hookimpl
def agl_runners() -> Iterable[RunnerEntry]:
    """Register the runner of experiments with ``[experiment] harness``."""
    yield RunnerEntry(
        name="harness",
        factory="agl_harness.runner:HarnessRunner",
        summary="a coding harness in a sandbox and a workspace of its own",
    )


@hookimpl
def agl_rewards() -> Iterable[RewardEntry]:
    """Register the rewards that run tests."""
    yield RewardEntry(
        name="tests",
        factory="agl_harness.workspace_tests:WorkspaceTests",
        summary="share of the tests that pass in a coding harness's workspace",
        takes_setup=True,
    )
    yield RewardEntry(
        name="harbor",
        factory="agl_harness.harbor_tasks.grading:HarborTests",
        summary="reward that a Harbor task's own tests write",
        takes_setup=True,
    )
