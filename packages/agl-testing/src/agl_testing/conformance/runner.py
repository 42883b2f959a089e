"""The conformance class of runners: whatever an agent does, its attempt gets a clear outcome and harms no other."""

# ruff: noqa: D102  # the names of the tests say what holds

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from agl import semconv
from agl.contracts import Runner, Store
from agl.schemas import Claim, NamedResources, Outcome, RetryPolicy, Rollout, Span
from agl.stores import MemoryStore
from agl.tracing import current
from agl_run import AgentSpec, RunContext
from agl_testing.conformance._base import Conformance, require, run
from agl_testing.stores.samples import make_rollout

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

MakeRunner = Callable[[RunContext], Runner]
Work = Callable[["Bench"], Awaitable[None]]

STOP_S = 10.0
"""Seconds after its start within which an agent with a short time limit must have been stopped."""

PYTHON_AGENTS = (
    AgentSpec(path="agl_testing.agents:behave"),
    AgentSpec(path="agl_testing.agents:behave_async"),
)
"""The agents of the conformance tests as Python functions, sync and async."""

COMMAND_AGENTS = (AgentSpec(command=(sys.executable, "-m", "agl_testing.agents")),)
"""The agent of the conformance tests as a program."""


class Bench:
    """A started runner with a store, for one test."""

    def __init__(self, runner: Runner, store: Store) -> None:
        self.runner = runner
        self.store = store

    async def claim(self, task: dict[str, Any], *, timeout_s: float | None = None, hidden: Sequence[str] = ()) -> Claim:
        """Enqueue a rollout of ``task``, claim it, and return the claim."""
        rollout = make_rollout(retry=RetryPolicy(timeout_s=timeout_s))
        asked = Rollout(rollout_id=rollout.rollout_id, task=task, retry=rollout.retry, hidden=tuple(hidden))
        await self.store.enqueue([asked])
        return (await self.store.claim(worker="bench"))[0]

    async def execute(self, task: dict[str, Any], *, timeout_s: float | None = None) -> Outcome:
        """Run ``task`` to its end, and return the outcome."""
        return await self.runner.execute(await self.claim(task, timeout_s=timeout_s))

    async def spans(self, outcome: Outcome, claim: Claim) -> list[Span]:
        """Return all spans of the attempt: those in the store, and those in its outcome."""
        written = await self.store.spans(claim.rollout.rollout_id, attempt_id=claim.attempt.attempt_id)
        return [*written, *outcome.spans]


class RunnerConformance(Conformance):
    """Run every test of the runner contract.

    .. code-block:: python

        class TestMyRunner(RunnerConformance):
            @pytest.fixture
            def make_runner(self):
                return MyRunner  # called with a RunContext
    """

    contract: ClassVar[str] = "runner"

    is_isolated: ClassVar[bool] = True
    """True if an agent that ends the process, by ``os._exit`` or a crash in C, ends only one attempt."""

    is_python: ClassVar[bool] = True
    """True if agents are Python functions: exceptions keep their type, and any object can be returned."""

    agents: ClassVar[tuple[AgentSpec, ...]] = PYTHON_AGENTS
    """The agents of the conformance tests in the forms that the runner accepts; ``COMMAND_AGENTS`` for programs."""

    @pytest.fixture
    def make_runner(self) -> MakeRunner:
        """A function that makes the runner under test from a :class:`RunContext`; the only fixture to override."""
        raise NotImplementedError("override the fixture 'make_runner' with the runner under test")

    def test_returned_number_is_the_reward(self, make_runner: MakeRunner) -> None:
        async def work(bench: Bench) -> None:
            outcome = await bench.execute({"do": "return", "value": 0.5})
            assert ("succeeded", None) == (outcome.status, outcome.error)
            assert [0.5] == [s.reward.value for s in outcome.spans if s.reward is not None]

        self._run(make_runner, work)

    def test_emitted_spans_and_rewards_belong_to_their_own_attempt(self, make_runner: MakeRunner) -> None:
        require(self.is_python, "is_python", "runner")

        async def one(bench: Bench, number: int) -> None:
            claim = await bench.claim({"do": "emit", "text": f"hello {number}", "value": number})
            outcome = await bench.runner.execute(claim)
            spans = await bench.spans(outcome, claim)
            own = (claim.rollout.rollout_id, claim.attempt.attempt_id)
            assert {own} == {(s.rollout_id, s.attempt_id) for s in spans}
            assert [f"hello {number}"] == [m for s in spans if (m := s.attributes.get(semconv.MESSAGE))]
            assert [float(number)] == [s.reward.value for s in spans if s.reward is not None]
            ids = [s.span_id for s in spans]
            assert sorted(set(ids)) == sorted(ids)
            assert [semconv.ROOT_SPAN_NAME] == [s.name for s in spans if s.parent_id not in ids]

        async def work(bench: Bench) -> None:
            await asyncio.gather(*(one(bench, number) for number in range(6)))

        self._run(make_runner, work)

    def test_agent_that_raises_is_a_failed_outcome_with_its_error(self, make_runner: MakeRunner) -> None:
        async def work(bench: Bench) -> None:
            outcome = await bench.execute({"do": "raise", "text": "broken agent"})
            assert "failed" == outcome.status
            assert outcome.error is not None
            assert "broken agent" in outcome.error.message
            assert "_raise" in outcome.error.traceback
            if self.is_python:
                assert "ValueError" == outcome.error.type

        self._run(make_runner, work)

    def test_agent_that_exits_or_cancels_itself_is_a_failed_outcome(self, make_runner: MakeRunner) -> None:
        async def work(bench: Bench) -> None:
            for behaviour in ("exit", "cancelled"):
                outcome = await bench.execute({"do": behaviour})
                assert (behaviour, "failed") == (behaviour, outcome.status)
                assert outcome.error is not None
                assert outcome.error.message
            assert "succeeded" == (await bench.execute({"do": "return", "value": 1})).status

        self._run(make_runner, work)

    def test_agent_that_kills_its_process_harms_no_other_attempt(self, make_runner: MakeRunner) -> None:
        require(self.is_isolated, "is_isolated", "runner")

        async def work(bench: Bench) -> None:
            good = asyncio.create_task(bench.execute({"do": "return", "value": 1, "seconds": 0.5}))
            bad = await bench.execute({"do": "hard_exit"})
            assert "failed" == bad.status
            assert bad.error is not None
            assert "7" in bad.error.message
            assert "succeeded" == (await good).status
            assert "succeeded" == (await bench.execute({"do": "return", "value": 1})).status

        self._run(make_runner, work)

    def test_agent_beyond_its_time_limit_is_stopped_and_reported(self, make_runner: MakeRunner, tmp_path: Path) -> None:
        async def work(bench: Bench) -> None:
            beats = tmp_path / f"beats-{time.monotonic_ns()}"
            started = time.monotonic()
            outcome = await bench.execute({"do": "hang", "beats": str(beats)}, timeout_s=1.5)
            assert "timeout" == outcome.status
            assert outcome.error is not None
            assert "1.5" in outcome.error.message
            assert time.monotonic() - started < STOP_S
            await _assert_stopped(beats)

        self._run(make_runner, work)

    def test_cancelled_execution_stops_the_agent(self, make_runner: MakeRunner, tmp_path: Path) -> None:
        async def work(bench: Bench) -> None:
            beats = tmp_path / f"beats-{time.monotonic_ns()}"
            running = asyncio.create_task(bench.execute({"do": "hang", "beats": str(beats)}))
            await _first_beat(beats)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await _assert_stopped(beats)
            assert "succeeded" == (await bench.execute({"do": "return", "value": 1})).status

        self._run(make_runner, work)

    def test_stop_stops_running_agents_and_may_be_repeated(self, make_runner: MakeRunner, tmp_path: Path) -> None:
        async def work(bench: Bench) -> None:
            beats = tmp_path / f"beats-{time.monotonic_ns()}"
            running = asyncio.create_task(bench.execute({"do": "hang", "beats": str(beats)}))
            await _first_beat(beats)
            await bench.runner.stop()
            await bench.runner.stop()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await _assert_stopped(beats)

        self._run(make_runner, work)

    def test_returned_object_that_is_no_json_is_a_failed_outcome_that_says_so(self, make_runner: MakeRunner) -> None:
        require(self.is_python, "is_python", "runner")

        async def work(bench: Bench) -> None:
            outcome = await bench.execute({"do": "object"})
            assert "failed" == outcome.status
            assert outcome.error is not None
            assert "object" in outcome.error.message

        self._run(make_runner, work)

    def test_agent_does_not_see_hidden_fields(self, make_runner: MakeRunner) -> None:
        async def work(bench: Bench) -> None:
            claim = await bench.claim({"do": "keys", "answer": 42}, hidden=["answer"])
            outcome = await bench.runner.execute(claim)
            outputs = [str(s.attributes[semconv.OUTPUT]) for s in outcome.spans if semconv.OUTPUT in s.attributes]
            assert [False] == ["answer" in text for text in outputs]
            assert "do" in outputs[0]

        self._run(make_runner, work)

    def test_process_of_the_agent_holds_no_hidden_fields(self, make_runner: MakeRunner) -> None:
        require(self.is_isolated, "is_isolated", "runner")

        async def work(bench: Bench) -> None:
            claim = await bench.claim({"do": "search", "answer": "concat" + "enation"}, hidden=["answer"])
            outcome = await bench.runner.execute(claim)
            outputs = [str(s.attributes[semconv.OUTPUT]) for s in outcome.spans if semconv.OUTPUT in s.attributes]
            assert [True] == ["'do': 'search'" in text for text in outputs]
            assert "concatenation" not in outputs[0]

        self._run(make_runner, work)

    def test_failing_attempts_leave_the_others_alone(self, make_runner: MakeRunner) -> None:
        async def work(bench: Bench) -> None:
            tasks = [{"do": "raise", "text": "x"}, {"do": "return", "value": 1}, {"do": "exit"}] * 3
            outcomes = await asyncio.gather(*(bench.execute(task) for task in tasks))
            assert ["failed", "succeeded", "failed"] * 3 == [o.status for o in outcomes]

        self._run(make_runner, work)

    def test_nothing_is_current_after_an_attempt(self, make_runner: MakeRunner) -> None:
        async def work(bench: Bench) -> None:
            await bench.execute({"do": "return", "value": 1})
            assert current() is None

        self._run(make_runner, work)

    def _run(self, make_runner: MakeRunner, work: Work) -> None:
        """Run ``work`` once for each of :attr:`agents`, every time with a new bench."""
        for agent in self.agents:
            run(_with_bench(make_runner, agent, work), limit_s=60)


async def _with_bench(make_runner: MakeRunner, agent: AgentSpec, work: Work) -> None:
    async with _bench(make_runner, agent) as bench:
        await work(bench)


@asynccontextmanager
async def _bench(make_runner: MakeRunner, agent: AgentSpec) -> "AsyncGenerator[Bench]":
    store = MemoryStore("memory://")
    setup = RunContext(agent=agent, store=store, secret=b"s" * 32, resources=_no_resources)
    runner = make_runner(setup)
    await runner.start()
    try:
        yield Bench(runner, store)
    finally:
        await runner.stop()
        await store.close()


async def _no_resources(rollout: Rollout) -> NamedResources:
    del rollout
    return {}


async def _first_beat(beats: Path) -> None:
    async with asyncio.timeout(20):
        while not beats.exists() or not beats.stat().st_size:
            await asyncio.sleep(0.01)


async def _assert_stopped(beats: Path) -> None:
    await asyncio.sleep(0.1)
    size = beats.stat().st_size if beats.exists() else 0
    await asyncio.sleep(0.2)
    assert size == (beats.stat().st_size if beats.exists() else 0), "the agent still runs"
