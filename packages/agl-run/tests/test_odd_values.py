"""A value that no store can hold affects only its attempt, or a part of a span, and never the run or other spans."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import agl
from agl import semconv
from agl.contracts import RolloutQuery, Runner, Store
from agl.errors import StoreError
from agl.schemas import (
    Attempt,
    Claim,
    ErrorInfo,
    ModelCall,
    NamedResources,
    Outcome,
    RetryPolicy,
    Reward,
    Rollout,
    Span,
    decode,
    encode,
)
from agl.stores import MemoryStore
from agl_run import AgentSpec, AsyncRunner, RunContext, Worker
from agl_run.runners import child
from agl_run.runners.process import ProcessRunner
from agl_run.runners.storable import storable_outcome, storable_span
from agl_run.worker import worker as workers
from agl_store_sqlite._store import SQLiteStore

HALF = "\udcff"


@pytest.fixture(params=["memory://", "sqlite:///"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory://" else SQLiteStore(f"sqlite:///{tmp_path / 'runs.db'}")


async def no_resources(_: Rollout) -> NamedResources:
    return {}


def setup_of(store: Store, agent: Any, *, folder: str = "") -> RunContext:
    spec = AgentSpec.of(agent, folder=folder)
    return RunContext(agent=spec, store=store, secret=b"x" * 32, resources=no_resources)


async def finished(
    store: Store, runner: Runner, tasks: Sequence[Any], *, meanwhile: Callable[[], Awaitable[None]] | None = None
) -> dict[str, Attempt]:
    """Run tasks with one worker, and return each rollout's only attempt; raises the worker's error if it gave up."""
    retry = RetryPolicy(max_attempts=1)
    queued = [Rollout(rollout_id=f"r{number}", task=task, retry=retry) for number, task in enumerate(tasks)]
    await store.enqueue(queued)
    worker = Worker(RunContext(store=store, concurrency=len(tasks)), runner)
    async with asyncio.timeout(60), worker:
        if meanwhile is not None:
            await meanwhile()
        while not all(rollout.is_finished for rollout in await store.rollouts(RolloutQuery())):
            assert worker.failure is not None
            if worker.failure.done():
                worker.failure.result()
            await asyncio.sleep(0.02)
        assert worker.failure is not None
        assert not worker.failure.done()
    left = await store.rollouts(RolloutQuery())
    return {rollout.rollout_id: (await store.attempts(rollout.rollout_id))[-1] for rollout in left}


class SilentError(Exception):
    """An error that cannot be converted to text."""

    def __str__(self) -> str:
        raise ValueError("no words")


async def odd(task: str) -> Any:
    """Do the unusual thing that the task names."""
    if task == "returns":
        return [2**70]
    if task == "raises":
        raise ValueError(f"bad {HALF} path")
    if task == "is silent":
        raise SilentError
    if task == "emits":
        agl.emit_object({"n": 2**70})
        agl.emit_message(HALF)
    if task == "names":
        with agl.operation(HALF):
            agl.emit_reward(1.0, name=HALF)
    return 1.0


def test_agent_with_odd_values_ends_no_run(store: Store) -> None:
    tasks = ["returns", "raises", "is silent", "emits", "names", "plain"]

    async def body() -> dict[str, Attempt]:
        found = await finished(store, AsyncRunner(setup_of(store, odd)), tasks)
        assert [semconv.ROOT_SPAN_NAME] == [span.name for span in await store.spans("r1")]
        assert {"\\udcff", semconv.ROOT_SPAN_NAME} < {span.name for span in await store.spans("r4")}
        await store.close()
        return found

    found = list(asyncio.run(body()).values())
    assert ["failed"] * 3 + ["succeeded"] * 3 == [attempt.status for attempt in found]
    errors = [attempt.error.message for attempt in found if attempt.error]
    assert "no store carries" in errors[0]
    assert ["bad \\udcff path"] == errors[1:2]
    assert "SilentError, whose __str__ raised" in errors[2]


class Scripted:
    """A runner that returns given outcomes."""

    def __init__(self, outcome: Callable[[Claim], Outcome]) -> None:
        self._outcome = outcome

    async def start(self) -> None: ...

    async def execute(self, claim: Claim) -> Outcome:
        return self._outcome(claim)

    async def stop(self) -> None: ...


def span_of(attempt_id: str, **fields: Any) -> Span:
    given: dict[str, Any] = {"rollout_id": "r0", "attempt_id": attempt_id, "span_id": "a" * 16, "name": "n", **fields}
    return Span(**given)


@pytest.mark.parametrize(
    ("fields", "said", "kept"),
    [
        ({"attributes": {"n": 2**70, "m": 1}}, "cannot be stored", 2),
        ({"attempt_id": "r0.2"}, "belongs to attempt 'r0.2'", 1),
        ({"reward": Reward(value=float("nan"))}, "with nan", 1),
    ],
)
def test_outcome_that_the_store_refuses_is_written_as_a_failure(
    fields: dict[str, Any], said: str, kept: int, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    def outcome(claim: Claim) -> Outcome:
        attempt_id = claim.attempt.attempt_id
        spans = (span_of(attempt_id, span_id="b" * 16), span_of(**{"attempt_id": attempt_id, **fields}))
        return Outcome(attempt_id=attempt_id, status="succeeded", spans=spans)

    async def body() -> tuple[dict[str, Attempt], list[Span]]:
        found = await finished(store, Scripted(outcome), [None]), await store.spans("r0")
        await store.close()
        return found

    found, spans = asyncio.run(body())
    error = found["r0"].error
    assert error is not None
    assert ("failed", "agl.errors") == (found["r0"].status, error.type.rpartition(".")[0])
    assert said in error.message
    assert kept == len(spans)
    assert [record.levelno for record in caplog.records if record.exc_info] == [logging.WARNING]


def test_store_that_is_out_of_reach_is_no_fault_of_the_outcome() -> None:
    class Full(MemoryStore):
        async def finish(self, outcomes: Sequence[Outcome]) -> list[Rollout]:
            raise StoreError("the disk is full")

    async def body() -> None:
        store = Full()
        await finished(store, AsyncRunner(setup_of(store, odd)), ["plain"])

    with pytest.raises(StoreError, match="the disk is full"):
        asyncio.run(body())


def test_error_of_a_refused_failure_stays_its_own() -> None:
    own = ErrorInfo(type="ValueError", message=HALF)
    given = Outcome(attempt_id="r0.1", status="timeout", error=own)
    expected = replace(given, error=replace(own, message="\\udcff"))
    assert expected == storable_outcome(given, StoreError("cannot be stored"))
    assert storable_outcome(expected, StoreError("the disk is full")) is None


def test_span_keeps_what_a_store_carries() -> None:
    whole = span_of("r0.1", attributes={"a": 1})
    assert storable_span(whole) is whole
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    call = ModelCall(request_id="q", dialect="chat", model="m", request={"seed": 2**70}, prompt_ids=b"1234")
    given = span_of("r0.1", name=HALF, attributes={"deep": deep, "a": 1}, call=call, reward=Reward(value=0.5))
    kept = storable_span(given)
    assert kept == decode(encode(kept), Span)
    assert ("\\udcff", 1, Reward(value=0.5)) == (kept.name, kept.attributes["a"], kept.reward)
    assert replace(call, request={"seed": str(2**70)}) == kept.call
    assert kept.attributes[semconv.NOT_STORED]


AGENT = """
import time, agl
from agl.schemas import Span
def agent(task):
    agl.emit_message("before")
    agl.emit_reward(0.25, name="partial")
    agl.emit_object({"n": 2**70})
    active = agl.current()
    ids = {"rollout_id": active.rollout_id, "attempt_id": active.attempt_id}
    active.add(Span(**ids, span_id="b" * 16, name="by hand", attributes={"n": 2**70}))
    time.sleep(1.6)
    agl.emit_message("after")
    return 1.0
"""


@pytest.mark.long
def test_child_sends_what_came_with_an_odd_value(tmp_path: Path) -> None:
    (tmp_path / "odd_agent.py").write_text(AGENT)

    async def body() -> list[Span]:
        store = MemoryStore()
        found = await finished(store, ProcessRunner(setup_of(store, "odd_agent:agent", folder=str(tmp_path))), [None])
        assert ["succeeded"] == [attempt.status for attempt in found.values()]
        return await store.spans("r0")

    spans = {span.name: span for span in asyncio.run(body())}
    assert {"message", "evaluate partial", "object object", "by hand", "rollout", "evaluate return"} == set(spans)
    assert {"n": str(2**70)} == spans["object object"].attributes[semconv.OBJECT]
    assert str(2**70) == spans["by hand"].attributes["n"]


def test_attempt_whose_spans_are_lost_in_the_child_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "FLUSH_S", 0.01)
    outcome = Outcome(attempt_id="r0.1", status="succeeded")

    class Recorder:
        def drain(self) -> list[Span]:
            raise OSError("no memory")

    async def body(recorder: Any) -> Outcome:
        flusher = asyncio.create_task(child._flush_loop(recorder, lambda _: None))  # pyright: ignore[reportArgumentType]
        await asyncio.sleep(0.05)
        return await child._flushed(flusher, outcome)

    assert outcome == asyncio.run(body(agl.tracing.SpanRecorder()))
    failed = asyncio.run(body(Recorder()))
    assert failed.error is not None
    assert ("failed", "OSError", "no memory") == (failed.status, failed.error.type, failed.error.message)


@pytest.mark.parametrize("is_renewed", [True, False])
def test_removed_rollout_ends_its_attempt_and_nothing_else(
    is_renewed: bool, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "LEASE_S", 0.3 if is_renewed else 30.0)
    ended: list[str] = []
    gone = asyncio.Event()

    async def agent(task: str) -> float:
        try:
            await gone.wait()
            await asyncio.sleep(1.0 if task == "kept" else 60.0 if is_renewed else 0.0)
        finally:
            ended.append(task)
        return 1.0

    async def removed() -> None:
        while len([r for r in await store.rollouts(RolloutQuery()) if r.status == "running"]) < 3:
            await asyncio.sleep(0.02)
        await store.cancel(["r0"])
        await store.delete(["r0"])
        gone.set()

    async def body() -> dict[str, Attempt]:
        runner = AsyncRunner(setup_of(store, agent))
        found = await finished(store, runner, ["removed", "kept", "kept"], meanwhile=removed)
        await store.close()
        return found

    found = asyncio.run(body())
    assert {"r1": "succeeded", "r2": "succeeded"} == {key: attempt.status for key, attempt in found.items()}
    assert ["kept", "kept", "removed"] == sorted(ended)
    assert {1} == {attempt.number for attempt in found.values()}
