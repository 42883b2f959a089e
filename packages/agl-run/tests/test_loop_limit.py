"""More rollouts at once than one event loop should run: they run, and a notice says how to spread them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from agl_inspect.terminal.program import cli
from agl_testing.experiments import write_experiment

AGENT = """
import asyncio

all_there, there = asyncio.Event(), 0


async def solve(task):
    global there
    there += 1
    if there == task:
        all_there.set()
    await asyncio.wait_for(all_there.wait(), timeout=100)
    return 1.0
"""

ADVICE = "set it to 256 and run them in 2 processes: start agl worker FILE as often as that takes, here or on other"


@pytest.fixture(autouse=True)
def forget_the_agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the agent's module after the test, because other tests have a module of the same name."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("agent", None)


def _experiment(folder: Path, *, concurrency: int, use: str = "async") -> str:
    more = f'[runner]\nuse = "{use}"\nconcurrency = {concurrency}\n\n[gateway]\nuse = "none"\n'
    return str(write_experiment(folder, agent=AGENT, train=[concurrency] * concurrency, val=[1], more=more))


@pytest.mark.parametrize(
    ("use", "concurrency", "is_named"), [("async", 257, True), ("async", 256, False), ("process", 257, False)]
)
def test_check_names_what_one_event_loop_should_not_hold(
    use: str, concurrency: int, is_named: bool, tmp_path: Path
) -> None:
    result = CliRunner().invoke(cli, ["check", _experiment(tmp_path, concurrency=concurrency, use=use)])
    assert 0 == result.exit_code, result.output
    assert is_named == ("warning: runner.concurrency is 257, and beyond 256 rollouts on one event" in result.output)
    assert is_named == (ADVICE in result.output)


def test_run_holds_as_many_as_it_is_told_and_says_so(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["run", _experiment(tmp_path, concurrency=300)])
    assert 0 == result.exit_code, result.output
    assert "recorded 300 rollouts, 0 failed, mean reward 1.000" in result.output
    assert "runner.concurrency is 300, and beyond 256 rollouts on one event loop their calls wait" in result.output
    assert ADVICE in result.output


def test_worker_says_what_one_event_loop_should_not_hold(tmp_path: Path) -> None:
    file = _experiment(tmp_path, concurrency=0)
    named = CliRunner().invoke(cli, ["worker", file, "--concurrency", "300"])
    assert "--concurrency is 300, and beyond 256 rollouts" in named.output
    assert "there is no store" in named.output  # it is not refused for that
    assert ADVICE not in CliRunner().invoke(cli, ["worker", file, "--concurrency", "256"]).output
