"""The core's runners pass the conformance class of runners."""

import pytest

from agl_run import AsyncRunner
from agl_run.runners.command import CommandRunner
from agl_run.runners.process import ProcessRunner
from agl_testing.conformance.runner import COMMAND_AGENTS, MakeRunner, RunnerConformance


class TestAsyncRunner(RunnerConformance):
    is_isolated = False

    @pytest.fixture
    def make_runner(self) -> MakeRunner:
        return AsyncRunner


class TestProcessRunner(RunnerConformance):
    @pytest.fixture
    def make_runner(self) -> MakeRunner:
        return ProcessRunner


class TestCommandRunner(RunnerConformance):
    is_python = False
    agents = COMMAND_AGENTS

    @pytest.fixture
    def make_runner(self) -> MakeRunner:
        return CommandRunner
