"""Idle slots and failed reward emitters are measured with a step, apart from the agent's own errors."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import agl_run
from agl import AlgorithmEntry, PluginManager, PromptTemplate, Rollout, Span, hookimpl
from agl.contracts import AlgorithmContext, Metric, StepReport
from agl.errors import GatewayLostError, PolicyError, RewardError
from agl.schemas import Episode, ErrorInfo
from agl.stores import MemoryStore
from agl_inspect.records.names import broke_in_reward
from agl_run import Quiet, Trainer
from agl_run.runners.judging import judged
from agl_run.runners.result import describe_error
from agl_run.watch.observers import Batch, StepShares
from agl_run.worker.slots import Slots
from tests.cases import ATTEMPT, ROLLOUT


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def episode(error: ErrorInfo | None = None) -> Episode:
    return Episode(rollout=ROLLOUT, attempt=replace(ATTEMPT, error=error), transitions=(), rows=(), reward=None)


def measured(shares: StepShares) -> Mapping[str, float]:
    return asyncio.run(shares.measure("grpo", step=1, uses={}))


def test_slots_add_up_the_time_that_agents_run() -> None:
    clock = Clock()
    slots = Slots(4, clock=clock)
    slots.take()
    slots.take()
    clock.now += 6
    slots.leave()
    clock.now += 2
    slots.leave()
    clock.now += 2
    assert (40.0, 14.0) == slots.totals()


def test_share_of_idle_slots_counts_the_time_of_collecting_only() -> None:
    shares = StepShares(4, is_judged=False)
    shares.batch(Batch(caller="grpo", episodes=[], slot_s=40.0, taken_s=14.0))
    assert {"slots": 4.0, "slots_idle_share": pytest.approx(1 - 14 / 40)} == measured(shares)
    assert {} == measured(shares)


def test_steps_that_found_their_rollouts_finished_have_no_share() -> None:
    shares = StepShares(4, is_judged=True)
    shares.batch(Batch(caller="grpo", episodes=[]))
    assert {} == measured(shares)


def test_only_broken_rewards_count_as_evaluator_errors() -> None:
    shares = StepShares(1, is_judged=True)
    own, judge = describe_error(ValueError("no answer")), describe_error(RewardError("the reward 'judge' raised"))
    shares.batch(Batch(caller="grpo", episodes=[episode(), episode(own), episode(judge), episode()]))
    assert {"evaluator_failed_share": 0.25} == measured(shares)
    assert not broke_in_reward(None)


def test_experiments_without_rewards_have_no_share_of_their_errors() -> None:
    shares = StepShares(1, is_judged=False)
    shares.batch(Batch(caller="grpo", episodes=[episode()]))
    assert {} == measured(shares)


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (PolicyError("the judge's model does not answer"), "the reward 'judge' failed: the judge's model does not"),
        (ValueError(), "the reward 'judge' failed: ValueError"),
        (RuntimeError("the reward 'judge' raised KeyError"), "the reward 'judge' raised KeyError"),
    ],
)
def test_broken_reward_is_named_once(raised: Exception, said: str) -> None:
    async def emit(_rollout: Rollout, _spans: Sequence[Span]) -> float:
        raise raised

    with pytest.raises(RewardError) as found:
        asyncio.run(judged("judge", emit, ROLLOUT, []))
    assert str(found.value).startswith(said)
    assert raised is found.value.__cause__


def test_lost_gateway_is_no_error_of_the_reward() -> None:
    def emit(_rollout: Rollout, _spans: Sequence[Span]) -> float:
        raise GatewayLostError("gone")

    with pytest.raises(GatewayLostError):
        asyncio.run(judged("judge", emit, ROLLOUT, []))


class Looks:
    """An algorithm that collects its tasks in each of three steps and learns nothing."""

    def __init__(self) -> None:
        self._step = 0

    async def setup(self, context: AlgorithmContext) -> None:
        self._context = context

    async def step(self) -> StepReport:
        self._step += 1
        await self._context.collect(self._context.train, step=self._step)
        return StepReport(step=self._step, is_finished=self._step == 3, metrics={"reward": 0.0})

    def state(self) -> dict[str, Any]:
        return {"step": self._step}

    async def restore(self, state: Mapping[str, Any]) -> None:
        self._step = state["step"]

    async def close(self) -> None: ...


class Said(Quiet):
    """Collects the lines that a run shows."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


class LooksPlugin:
    @hookimpl
    def agl_algorithms(self) -> list[AlgorithmEntry]:
        return [AlgorithmEntry(name="looks", factory=Looks, tunes=("prompt_template",), needs_token_ids=False)]


def test_run_logs_the_shares_of_each_step_and_tells_of_a_reward_that_breaks(tmp_path: Path) -> None:
    def judge(rollout: Rollout, _spans: Sequence[Span]) -> float:
        return 1.0 / rollout.task["number"]

    async def solve(_task: Any) -> None:
        await asyncio.sleep(0.01)

    manager = PluginManager.from_environment()
    manager.register(LooksPlugin(), name="looks")
    store, said = MemoryStore(), Said()
    trainer = Trainer(
        algorithm="looks",
        rewards=judge,
        name="shares",
        initial_resources={"prompt": PromptTemplate(template="none")},
        runner=agl_run.runner("async", concurrency=8),
        store=store,
        folder=tmp_path,
        plugins=manager,
        progress=said,
    )
    trainer.fit(solve, train_dataset=[{"number": number} for number in range(4)])

    async def logged() -> list[Metric]:
        return await store.metrics("shares")

    found = {(each.step, each.name): each.value for each in asyncio.run(logged())}
    assert [0.25] * 3 == [found[step, "evaluator_failed_share"] for step in (1, 2, 3)]
    assert [8.0] * 3 == [found[step, "slots"] for step in (1, 2, 3)]
    assert all(0.4 < found[step, "slots_idle_share"] < 1 for step in (1, 2, 3))
    (told,) = [line for line in said.lines if "a reward broke" in line]
    assert "a reward broke in 25% of the rollouts" in told
