"""ReMax compares rollouts with a greedy one of their task, which is run, recorded and never trained."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import openai
import pytest
import torch

import agl
from agl.algorithms import algorithm
from agl.contracts import RolloutQuery
from agl.errors import ConfigError
from agl.schemas import CallCredit, Weights, unpack_ids
from agl_algo_torch.data.credited_rows import prepare
from agl_algo_torch.grpo import GRPO
from agl_objectives.groups import GREEDY, NO_BASELINE, baseline_of
from agl_objectives.registry import find_estimator
from agl_run import Quiet, policy
from agl_store_sqlite._store import SQLiteStore
from agl_testing.commands import invoke_agl
from agl_testing.conformance import AlgorithmConformance, AlgorithmScenario
from agl_testing.conformance.bench import AlgorithmBench

from .token_world import World, made, paid_by_another, run, with_rewards

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from agl.contracts import StepReport
    from agl.schemas import Episode
    from agl_testing.conformance.bench import RolloutOrder


class GreedyWorld(World):
    """A world in which the greedy rollout of a task has the reward `greedy`, or none for `None`."""

    def __init__(self, greedy: float | None) -> None:
        super().__init__()
        self.greedy = greedy

    def play(self, order: RolloutOrder) -> Episode:
        played = super().play(order)
        return msgspec.structs.replace(played, reward=self.greedy) if order.is_greedy else played


def scenario_of(model_dir: Path, world: World, **params: Any) -> AlgorithmScenario:
    settings = {"steps": 3, "tasks_per_step": 2, "group_size": 2, "lr": 3e-3, "threads": 1, "device": "cpu", **params}
    return AlgorithmScenario(
        make=lambda: made(GRPO, estimator="remax", **settings),
        play=world.play,
        tunes=("llm",),
        resources={"llm": Weights(uri=str(model_dir))},
        max_steps=40,
    )


def first_step(model_dir: Path, folder: Path, world: World, **params: Any) -> tuple[StepReport, AlgorithmBench]:
    bench = AlgorithmBench(scenario_of(model_dir, world, steps=1, **params), folder)
    (report,) = asyncio.run(run(bench))
    return report, bench


class TestConformance(AlgorithmConformance):
    @pytest.fixture
    def scenario(self, model_dir: Path) -> AlgorithmScenario:
        chosen = {"curriculum": "frontier"}
        longer = scenario_of(model_dir, GreedyWorld(0.25), steps=4, **chosen)
        return replace(scenario_of(model_dir, GreedyWorld(0.25), **chosen), make_longer=longer.make)


def remax_of_the_paper(rewards_R_T: torch.Tensor, baseline_R: torch.Tensor, mask_R_T: torch.Tensor) -> torch.Tensor:
    """Return the sum of the rewards from each token on, minus the greedy reward (arXiv 2310.10505, algorithm 1)."""
    reversed_R_T = (rewards_R_T * mask_R_T).flip(1)
    return (reversed_R_T.cumsum(1).flip(1) - baseline_R[:, None]) * mask_R_T


def test_advantages_are_those_of_the_papers_formula_at_every_token(model_dir: Path) -> None:
    groups = [paid_by_another(model_dir, count=8)[:4], paid_by_another(model_dir, count=8)[4:]]
    groups = [with_rewards(groups[0], 0.1, 0.7, 0.7, 1.3), with_rewards(groups[1], -2.0, 5.5, 0.0, 1.0)]
    greedy = with_rewards([groups[0][0], groups[1][0]], 0.3, 1.0)
    credit = agl.episodes.EpisodeCredit()
    baselines = [found for e in greedy if (found := baseline_of(e, credit=credit))]
    remax = find_estimator("remax", None).call

    samples = prepare(groups, credit=credit, estimator=remax, baselines=baselines).samples

    rewards = [e.reward or 0.0 for group in groups for e in group]
    length = max(len(s.ids) for s in samples)
    rewards_R_T, mask_R_T = torch.zeros(8, length, dtype=torch.float64), torch.zeros(8, length, dtype=torch.float64)
    for index, sample in enumerate(samples):
        mask_R_T[index, : len(sample.ids)] = sample.mask
        rewards_R_T[index, int(sample.mask.nonzero()[-1])] = rewards[index]  # the outcome, at the last token
    expected_R_T = remax_of_the_paper(rewards_R_T, torch.tensor([0.3] * 4 + [1.0] * 4, dtype=torch.float64), mask_R_T)
    found_R_T = torch.stack([torch.nn.functional.pad(s.advantages, (0, length - len(s.ids))) for s in samples])
    torch.testing.assert_close(found_R_T.double(), expected_R_T, atol=1e-6, rtol=1e-6)


class PerAgent:
    """Gives the first call a tenth of the reward and the second the whole reward, with different baseline keys."""

    def assign(self, group: Sequence[Episode]) -> list[list[CallCredit]]:
        return [
            [
                CallCredit(span_id=call.span_id, value=(e.reward or 0.0) * share, baseline=key)
                for call, share, key in zip(e.transitions, (0.1, 1.0), ("planner", "writer"), strict=True)
            ]
            for e in group
        ]


def test_calls_are_compared_with_what_credit_gave_the_greedy_ones_of_their_key(model_dir: Path) -> None:
    group = with_rewards(paid_by_another(model_dir, count=2), 1.0, 0.5)
    baseline = baseline_of(with_rewards(group[:1], 0.8)[0], credit=PerAgent())
    assert baseline is not None
    found = prepare([group], credit=PerAgent(), estimator=find_estimator("remax", None).call, baselines=[baseline])
    advantages = [use.advantage for e in group for use in found.uses[e.rollout.rollout_id]]
    assert [0.02, 0.2, -0.03, -0.3] == pytest.approx(advantages)
    assert 0.8 == baseline.of("a key that the greedy rollout has no call of")


def test_one_greedy_rollout_per_task_is_compared_with_counted_and_not_trained(model_dir: Path, tmp_path: Path) -> None:
    report, bench = first_step(model_dir, tmp_path, GreedyWorld(0.25))
    greedy = {name for name in bench.collected if "-greedy-" in name}
    assert 2 == len(greedy) == report.metrics["rollouts_greedy"]
    assert (0.25, 4.0) == (report.metrics["reward_greedy"], report.metrics["rollouts"])
    assert {"test"} == {bench.collected[name].rollout.mode for name in greedy}
    assert set(bench.collected) - greedy == set(report.trained)
    assert {GREEDY} == {use.note for name in greedy for use in report.uses[name]}
    for name in report.trained:
        reward = bench.collected[name].reward or 0.0
        assert [reward - 0.25] * 2 == pytest.approx([use.advantage for use in report.uses[name]])


def test_one_rollout_per_task_is_enough(model_dir: Path, tmp_path: Path) -> None:
    report, _ = first_step(model_dir, tmp_path, GreedyWorld(-1.0), group_size=1)
    assert (2, 0.0) == (len(report.trained), report.metrics["groups_silent"])


def test_tasks_whose_greedy_rollout_has_no_reward_are_left_out_with_the_reason(model_dir: Path, tmp_path: Path) -> None:
    report, bench = first_step(model_dir, tmp_path, GreedyWorld(None))
    assert ((), 2.0, 1.0) == (
        report.trained,
        report.metrics["groups_without_baseline"],
        report.metrics["updates_skipped"],
    )
    ordinary = [name for name in bench.collected if "-greedy-" not in name]
    assert {NO_BASELINE} == {use.note for name in ordinary for use in report.uses[name]}


def test_rounds_that_compare_rollouts_with_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"refill = 2, which replaces groups whose rollouts do not differ.*greedy"):
        made(GRPO, estimator="remax", refill=2)


async def write(task: dict[str, str], llm: agl.LLM) -> float:
    """Make one call with a temperature and a top-p; greedy rollouts must override both."""
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key or "none") as client:
        said: Any = [{"role": "user", "content": task["text"]}]
        answer = await client.chat.completions.create(
            model=llm.model, messages=said, max_tokens=6, temperature=0.9, top_p=0.5
        )
    return float(len(answer.choices[0].message.content or "") % 7)


def trainer_of(model_dir: Path, folder: Path, **settings: Any) -> agl.Trainer:
    params: dict[str, Any] = {"compute": {"device": "cpu", "threads": 1}, "tunes": "llm", "estimator": "remax"}
    return agl.Trainer(
        name="compared",
        algorithm=algorithm("grpo", steps=1, tasks_per_step=2, group_size=2, **params),
        policies={"llm": policy("torch", model=str(model_dir), threads=1)},
        store=f"sqlite:///{folder}/runs.db",
        folder=folder,
        progress=Quiet(),
        **settings,
    )


def test_an_experiment_asks_its_policy_greedily_whatever_the_agent_asks(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    trainer_of(model_dir, tmp_path).fit(write, [{"text": "a"}, {"text": "b"}])

    async def recorded() -> tuple[dict[str, list[Any]], set[str]]:
        store = SQLiteStore(f"sqlite:///{tmp_path}/runs.db")
        try:
            found = await store.rollouts(RolloutQuery(experiment="compared"))
            calls = {
                r.rollout_id: [span.call for span in await store.spans(r.rollout_id) if span.call is not None]
                for r in found
            }
            return calls, set(await store.trained("compared", run=1, algorithm="grpo"))
        finally:
            await store.close()

    calls, trained = asyncio.run(recorded())
    greedy = {name for name in calls if "-greedy-" in name}
    assert (2, 4) == (len(greedy), len(calls) - len(greedy))
    assert {0.0} == {call.sampling.temperature for name in greedy for call in calls[name]}
    assert {(0.9, 1.0)} == {
        (call.sampling.temperature, call.sampling.top_p) for name in calls.keys() - greedy for call in calls[name]
    }
    assert trained <= calls.keys() - greedy
    said = invoke_agl("why", sorted(greedy)[0], "--store", "runs.db", folder=tmp_path)
    assert f"did not train: {GREEDY}" in said
    # The likeliest tokens, one by one.
    from agl_algo_torch.learner.model import load_model

    model = load_model(str(model_dir), device="cpu").model
    call = calls[sorted(greedy)[0]][0]
    ids = unpack_ids(call.prompt_ids)
    for token in unpack_ids(call.response_ids):
        with torch.no_grad():
            assert token == int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        ids = [*ids, token]


def test_greedy_rollouts_without_a_gateway_are_refused(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    trainer = trainer_of(model_dir, tmp_path, gateway="none")
    with pytest.raises(ConfigError, match=r"only the gateway gives their calls temperature 0; remove \[gateway\]"):
        trainer.fit(write, [{"text": "a"}, {"text": "b"}])
