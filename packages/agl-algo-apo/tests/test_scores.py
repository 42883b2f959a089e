"""Reported scores: their scale, their intervals, the same number everywhere, and no winner that is worse."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl.contracts import Store
from agl.errors import ConfigError
from agl.schemas import Reward, Rollout, Span
from agl_algo_apo.measurement.estimates import Range, estimate
from agl_algo_apo.measurement.scores import FRESH, Measured, Scores, Split
from agl_store_sqlite._store import SQLiteStore
from worlds.prompts import PromptWorld, easy
from worlds.prompts_run import OrderReward

Optimize = Callable[..., Any]


def percent(world: PromptWorld) -> Callable[..., Reward | None]:
    """Return the world's reward function on a scale from 0 to 100."""
    plain = OrderReward(world=msgspec.to_builtins(world))

    def reward(rollout: Rollout, spans: Sequence[Span]) -> Reward | None:
        found = plain(rollout, spans)
        return found and msgspec.structs.replace(found, value=100 * found.value)

    return reward


@pytest.mark.parametrize(
    ("rewards", "low", "high"),
    [([1.0] * 13, 0.7719, 1.0), ([0.0] * 13, 0.0, 0.2281), ([1.0] * 8 + [0.0] * 2, 0.4902, 0.9433)],
)
def test_interval_of_rewards_of_0_and_1_is_that_of_wilson(rewards: list[float], low: float, high: float) -> None:
    found = estimate(rewards, Range())
    assert (low, high) == (round(found.low, 4), round(found.high, 4))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.sampled_from([1.0, 10.0, 100.0]))
def test_interval_has_a_width_holds_the_mean_and_stays_in_the_range(shares: list[float], scale: float) -> None:
    found = estimate([scale * share for share in shares], Range(high=scale))
    assert 0.0 <= found.low <= found.mean + 1e-9
    assert found.mean - 1e-9 <= found.high <= scale * (1 + 1e-9)
    assert found.low < found.high


def test_interval_of_partial_credit_that_hardly_varies_is_narrower() -> None:
    steady, torn = estimate([0.5] * 32, Range()), estimate([0.0, 1.0] * 16, Range())
    assert steady.high - steady.low < 0.4 * (torn.high - torn.low)


@pytest.mark.parametrize("use", ["apo", "random", "gepa"])
def test_rewards_above_the_perfect_score_are_refused_with_the_scale_to_set(optimize: Optimize, use: str) -> None:
    if use == "gepa":
        pytest.importorskip("gepa", reason="needs gepa")
    world = easy(1)
    with pytest.raises(
        ConfigError, match=r"got the reward [0-9.]+, and scoring.perfect is 1: .* scoring.perfect = 100, or"
    ):
        optimize(world, use=use, budget=200, settings={"rewards": (percent(world),)})


def test_rewards_on_a_scale_of_100_are_tuned_like_those_on_one_of_1(optimize: Optimize) -> None:
    world = easy(1)
    run = optimize(world, budget=300, scoring={"perfect": 100}, settings={"rewards": (percent(world),)})
    score = run.result["score"]
    assert world.gap_closed(run.best) > 0.8
    assert abs(score["mean"] - 100 * world.expected(run.best)) < 15
    assert 0 <= score["low"] < score["mean"] <= score["high"] <= 100


def test_one_score_of_a_candidate_stands_in_every_place(optimize: Optimize, tmp_path: Path) -> None:
    store = SQLiteStore(f"sqlite:///{tmp_path}/runs.db")

    async def read(store: Store) -> dict[str, Any]:
        return {score.version: score for score in await store.scores("clerk_prompt")}

    run = optimize(budget=250, store=store)
    scores = asyncio.run(read(store))
    asyncio.run(store.close())
    measured = {row["id"]: row for row in run.lineage if row["score"]}
    told = {row["versions"]["clerk_prompt"]: tuple(row["score"].values()) for row in measured.values()}
    assert {v: (s.mean, s.low, s.high, s.n, s.how) for v, s in scores.items() if v in told} == told
    live = scores[run.fit.resources["clerk_prompt"]]
    reported = run.result["score"]
    assert (reported["mean"], reported["low"], reported["high"]) == (live.mean, live.low, live.high)
    assert reported["mean"] == measured[run.result["winner"]]["score"]["mean"]
    assert f"score {reported['mean']:.3f} [{reported['low']:.3f}, {reported['high']:.3f}]" in run.stop_reason


def test_winner_that_is_worse_than_the_first_prompt_on_fresh_rollouts_is_taken_back(optimize: Optimize) -> None:
    world = easy(1)

    def fault(rollout: Rollout) -> None:
        if "-final-" in rollout.rollout_id and rollout.resources["clerk_prompt"] != "orders-1-initial":
            raise ValueError("no luck any more")

    run = optimize(world, budget=200, fault=fault)
    assert run.lineage[0]["id"] == run.result["winner"]
    assert run.result["score"] == run.result["seed_score"]
    assert "the first prompt stays, with a score of 0." in run.stop_reason
    assert f"the best candidate, {run.result['beaten']}, has 0.000 [0.000, " in run.stop_reason
    assert world.seeds()["clerk_prompt"].template == run.best["clerk_prompt"]
    assert f"orders-1-apo-{run.progress['step']}" == run.fit.resources["clerk_prompt"]


def known(split: Split, *rewards: float) -> Scores:
    """Return the scores of one candidate on one task, one per repeat."""
    scores = Scores()
    for repeat, reward in enumerate(rewards):
        scores.put("a", split, 0, repeat, Measured(reward=reward, rollout=f"r-{repeat}"))
    return scores


def test_fresh_rewards_choose_nothing_on_validation_tasks_until_the_search_goes_on() -> None:
    scores = known("val", 0.0, 1.0, 0.5)
    assert ({0: 0.25}, {0: 1.0}) == (scores.rewards("a", "val"), scores.fresh("a"))
    scores.keep_fresh()
    assert ({0: 0.5}, {}) == (scores.rewards("a", "val"), scores.fresh("a"))


def test_every_repeat_on_a_test_task_counts_and_stays_when_the_search_goes_on() -> None:
    scores = known("test", 0.0, 1.0, 0.5)
    assert {0: 0.5} == scores.rewards("a", "test")
    scores.keep_fresh()
    assert scores.get("a", "test", 0, FRESH) == Measured(reward=1.0, rollout="r-1")


def test_score_on_test_tasks_is_made_of_all_rollouts_that_were_paid_for(optimize: Optimize) -> None:
    run = optimize(budget=250, scoring={"reserve": 0.2})
    rewards: dict[int, list[float]] = {}
    for owner, split, task, _, measured in run.state["scores"]:
        if (owner, split) == (run.result["winner"], "test"):
            rewards.setdefault(task, []).append(measured["reward"])
    assert {3} == {len(values) for values in rewards.values()}
    assert run.result["how"] == "test tasks"
    assert run.result["score"]["mean"] == pytest.approx(fmean(map(fmean, rewards.values())))


def test_final_tasks_are_drawn_from_all_and_not_those_that_decided_most_races(optimize: Optimize) -> None:
    run = optimize(budget=200)
    early = {r.task["order"] for r in run.paid if "-race0-" in r.rollout_id or "-part0-" in r.rollout_id}
    final = {r.task["order"] for r in run.paid if "-final-" in r.rollout_id}
    assert final
    assert not early >= final
