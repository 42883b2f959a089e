"""gepa's adapter with the real library, and a host without an experiment."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from worlds.prompts import PromptWorld, complete_order, easy, judge, order_text
from worlds.prompts_optimizer import ScriptedOptimizer

gepa = pytest.importorskip("gepa", reason="needs gepa")

from agl_algo_apo.measurement.scores import Measured  # noqa: E402
from agl_algo_apo.proposals.evidence import EvidenceRun  # noqa: E402
from agl_algo_apo.proposals.gepa_adapter import MAX_IDLE, GepaAdapter, PhaseCancelledError, TaskPlace, TextByName  # noqa: E402
from agl_algo_apo.proposals.optimizer import OptimizerDownError  # noqa: E402
from agl_algo_apo.search.budget import Budget, BudgetExhaustedError, BudgetLimits  # noqa: E402

SEED = "You are the clerk.\nComplete the order.\n{order}"


class WorldHost:
    """A host that measures in this process, in a world without noise."""

    def __init__(self, world: PromptWorld, *, rollouts: int, optimizer: Any = None) -> None:
        self.budget = Budget(BudgetLimits(rollouts=rollouts))
        self.requests: list[str] = []
        self.perfect = False
        self.scores: dict[tuple[str, TaskPlace], Measured] = {}
        self._world = world
        self._optimizer = optimizer or ScriptedOptimizer()

    async def refusal(self, texts: TextByName) -> str:
        return "" if "{order}" in texts["clerk_prompt"] else "lost the placeholder"

    async def measure(self, texts: TextByName, places: Sequence[TaskPlace]) -> None:
        prompt = texts["clerk_prompt"]
        new = [place for place in places if (prompt, place) not in self.scores]
        self.budget.take_rollouts(len(new))
        await asyncio.sleep(0)
        for place in new:
            task = (self._world.train if place[0] == "train" else self._world.val)[place[1]]
            text = f"{prompt}\n{order_text(task['order'], task['fields']['clerk'])}"
            answer = complete_order(text, world=self._world, seed=str(place))
            reward, feedback = judge(self._world, task, answer, is_short=False, seed=str(place))
            self.scores[(prompt, place)] = Measured(reward=reward, rollout=str(place), feedback=feedback)

    def known(self, texts: TextByName, place: TaskPlace) -> Measured | None:
        return self.scores.get((texts["clerk_prompt"], place))

    async def evidence(self, name: str, texts: TextByName, measured: Sequence[Measured]) -> list[EvidenceRun]:
        return [EvidenceRun(task=item.rollout, measured=item, lines=("made: an answer",)) for item in measured]

    async def ask(self, request: str, number: int) -> str:
        self.requests.append(request)
        return self._optimizer.answer(request, seed=number)

    def spent_rollouts(self) -> int:
        return self.budget.spent.rollouts

    def stop_reason(self) -> str:
        return "perfect" if self.perfect else ""


class Silent:
    def log(self, message: str) -> None:
        del message


async def optimise(host: WorldHost, world: PromptWorld, *, patience: int = 5) -> tuple[GepaAdapter, Any]:
    adapter = GepaAdapter(host, asyncio.get_running_loop(), patience=patience)
    try:
        result = await asyncio.to_thread(
            gepa.optimize,
            seed_candidate={"clerk_prompt": SEED},
            trainset=[("train", n) for n in range(len(world.train))],
            valset=[("val", n) for n in range(len(world.val))],
            adapter=adapter,
            reflection_lm=adapter.reflect,
            stop_callbacks=[adapter.should_stop],
            logger=Silent(),
            seed=3,
        )
    except BudgetExhaustedError:
        return adapter, None
    return adapter, result


def play(host: WorldHost, world: PromptWorld, **options: Any) -> tuple[GepaAdapter, Any]:
    return asyncio.run(optimise(host, world, **options))


def world() -> PromptWorld:
    return PromptWorld(rules=easy().rules, noise=0.0, nagging=0.0, train_size=12, val_size=12)


def test_library_finds_rules_and_its_reflection_sees_the_feedback() -> None:
    host = WorldHost(world(), rollouts=400)
    play(host, world())
    best = max({prompt for prompt, _ in host.scores}, key=lambda prompt: world().expected({"clerk_prompt": prompt}))
    assert world().gap_closed({"clerk_prompt": best}) > 0.6
    assert SEED in host.requests[0]
    assert "[clerk]" in host.requests[0]


def test_budget_is_never_exceeded_and_ends_the_phase() -> None:
    for rollouts in (20, 31, 57, 100):
        host = WorldHost(world(), rollouts=rollouts)
        adapter, _ = play(host, world())
        assert host.budget.spent.rollouts <= rollouts
        assert "budget" == adapter.stopped


def test_broken_proposals_cost_nothing_and_end_the_phase() -> None:
    class Broken(ScriptedOptimizer):
        def answer(self, text: str, *, model: str = "", seed: Any = None) -> str:
            return "```\nDo as you like.\n```"

    host = WorldHost(world(), rollouts=400, optimizer=Broken())
    adapter, _ = play(host, world(), patience=4)
    assert "no_proposals" == adapter.stopped
    assert {SEED} == {prompt for prompt, _ in host.scores}
    assert 4 == len(host.requests)


def test_dead_optimizer_ends_the_phase_at_once() -> None:
    class Dead(ScriptedOptimizer):
        def answer(self, text: str, *, model: str = "", seed: Any = None) -> str:
            raise OptimizerDownError("HTTP 503")

    host = WorldHost(world(), rollouts=400, optimizer=Dead())
    adapter, _ = play(host, world())
    assert "optimizer_unreachable" == adapter.stopped
    assert 1 == len(host.requests)
    assert host.budget.spent.rollouts <= 12 + 3


def test_host_ends_the_phase() -> None:
    host = WorldHost(world(), rollouts=400)
    host.perfect = True
    adapter, _ = play(host, world())
    assert "perfect" == adapter.stopped
    assert [] == host.requests


def test_iterations_that_pay_for_nothing_end_the_phase() -> None:
    class Same(ScriptedOptimizer):
        def answer(self, text: str, *, model: str = "", seed: Any = None) -> str:
            return f"```\n{SEED}\n```"

    host = WorldHost(world(), rollouts=400, optimizer=Same())
    adapter, _ = play(host, world())
    assert "nothing_to_learn" == adapter.stopped
    assert len(host.requests) < MAX_IDLE + 8


def test_equal_seeds_give_equal_phases() -> None:
    hosts = [WorldHost(world(), rollouts=200) for _ in range(2)]
    for host in hosts:
        play(host, world())
    assert hosts[0].requests == hosts[1].requests
    assert hosts[0].scores == hosts[1].scores


def test_cancelled_phase_ends_its_thread() -> None:
    async def run() -> None:
        host = WorldHost(world(), rollouts=400)
        reached = asyncio.Event()

        async def wait_for_ever(request: str, number: int) -> str:
            reached.set()
            await asyncio.Event().wait()
            return ""

        host.ask = wait_for_ever
        adapter = GepaAdapter(host, asyncio.get_running_loop(), patience=5)
        thread = asyncio.create_task(
            asyncio.to_thread(
                gepa.optimize,
                seed_candidate={"clerk_prompt": SEED},
                trainset=[("train", 0), ("train", 1)],
                valset=[("val", 0)],
                adapter=adapter,
                reflection_lm=adapter.reflect,
                stop_callbacks=[adapter.should_stop],
                logger=Silent(),
            )
        )
        await reached.wait()
        adapter.cancel()
        with pytest.raises(PhaseCancelledError):
            await thread

    asyncio.run(asyncio.wait_for(run(), 20))
