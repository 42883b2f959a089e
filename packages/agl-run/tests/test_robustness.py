"""Failures around a run must not hang it, lose recorded data, or cause data to be paid for again."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import agl
from agl.contracts import ExperimentRecord, Upstream
from agl.errors import ConfigError, StoreError
from agl.schemas import NamedResources, Rollout, Span
from agl.stores import MemoryStore
from agl_inspect.records import state as saved
from agl_run import AgentSpec, AsyncRunner, Quiet, RunContext, Trainer
from agl_run.run.schedule import concurrent, sequential
from agl_run.runners.command import CommandRunner
from agl_run.runners.process import ProcessRunner


async def no_resources(_: Rollout) -> NamedResources:
    return {}


class Failing:
    """An algorithm that cannot begin."""

    is_finished = False

    def __init__(self) -> None:
        self.ends = 0

    async def begin(self) -> None:
        raise ConfigError("no such data")

    async def step(self) -> None:
        raise AssertionError("it never began")

    async def end(self) -> None:
        self.ends += 1


async def nothing() -> None: ...


@pytest.mark.parametrize("schedule", [sequential, concurrent])
def test_algorithm_that_cannot_begin_is_released_and_its_error_comes_through(
    schedule: Callable[..., Awaitable[None]],
) -> None:
    turn = Failing()

    async def run() -> None:
        await schedule([turn], after_step=nothing)

    with pytest.raises(ConfigError, match="no such data"):
        asyncio.run(run())
    assert 1 == turn.ends


def test_fresh_start_cancels_what_the_stopped_run_left_queued(tmp_path: Path) -> None:
    store = MemoryStore()
    seen: list[Any] = []

    def agent(task: Any) -> float:
        seen.append(task)
        return 1.0

    async def before() -> None:
        await store.enqueue([Rollout(rollout_id="old", task="old", experiment="e")])
        await saved.save_progress(store, ExperimentRecord(name="e", run=1))

    asyncio.run(before())
    trainer = Trainer(name="e", store=store, folder=tmp_path, progress=Quiet())
    trainer.fit(agent, ["new"], fresh=True)

    assert ["new"] == seen
    assert "cancelled" == asyncio.run(rollout_status(store, "old"))


async def rollout_status(store: MemoryStore, rollout_id: str) -> str:
    from agl.contracts import RolloutQuery

    return (await store.rollouts(RolloutQuery(ids=(rollout_id,))))[0].status


class Refusing(MemoryStore):
    """A store that refuses the first writes of spans."""

    refusals = 3

    async def append_spans(self, spans: Sequence[Span]) -> None:
        if self.refusals:
            self.refusals -= 1
            raise StoreError("the disk is full for a moment")
        await super().append_spans(spans)


def test_spans_that_the_store_refused_come_with_the_attempts_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_run.runners.local.FLUSH_S", 0.02)

    async def agent(task: Any) -> None:
        for number in range(10):
            agl.emit_message(f"message {number}")
            await asyncio.sleep(0.02)

    async def run() -> list[str]:
        store = Refusing()
        setup = RunContext(agent=AgentSpec.of(agent), store=store, secret=b"x" * 32, resources=no_resources)
        runner = AsyncRunner(setup)
        await runner.start()
        await store.enqueue([Rollout(rollout_id="r", task=1)])
        claim = (await store.claim(worker="w"))[0]
        await store.finish([await runner.execute(claim)])
        await runner.stop()
        return [span.name for span in await store.spans("r")]

    assert 11 == len(asyncio.run(run()))


@pytest.mark.long
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills a process by signal")
def test_child_that_died_while_it_waited_is_replaced() -> None:
    async def run() -> str:
        store = MemoryStore()
        spec = AgentSpec(path="agl_testing.agents:behave")
        setup = RunContext(agent=spec, store=store, secret=b"x" * 32, resources=no_resources)
        runner = ProcessRunner(setup)
        await runner.start()
        (child,) = runner._idle
        os.kill(child._process.pid, signal.SIGKILL)
        await child._process.wait()
        await store.enqueue([Rollout(rollout_id="r", task={"do": "return", "value": 1.0})])
        outcome = await runner.execute((await store.claim(worker="w"))[0])
        await runner.stop()
        return outcome.status

    assert "succeeded" == asyncio.run(run())


def test_program_of_an_agent_finds_no_key_but_its_own_in_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AGL_SECRET", "y" * 32)
    monkeypatch.setenv("AGL_TOKEN", "an-admin-token")
    monkeypatch.setenv("AGL_POLICY_KEY", "a-policy-key")
    monkeypatch.setenv("AGL_PROVIDER", "a-provider-key")
    monkeypatch.setenv("AGL_OTHER", "inherited")
    names = ("SECRET", "TOKEN", "POLICY_KEY", "PROVIDER", "OTHER")
    code = f"import os; print(*sorted(os.environ.get('AGL_' + name, 'none')[:5] for name in {names!r}))"

    async def run() -> object:
        store = MemoryStore()
        setup = RunContext(
            agent=AgentSpec(command=(sys.executable, "-c", code)),
            store=store,
            secret=b"x" * 32,
            resources=no_resources,
            gateway_url="http://127.0.0.1:9",
            upstreams=(Upstream(name="m", base_url="http://127.0.0.1:9/v1", api_key_env="AGL_PROVIDER"),),
        )
        await store.enqueue([Rollout(rollout_id="r", task=1)])
        outcome = await CommandRunner(setup).execute((await store.claim(worker="w"))[0])
        return outcome.spans[0].attributes["agl.output"]

    assert "agl_W inher none none none\n" == asyncio.run(run())
