"""Single steps of a search: what the critic sees, what is paid, raced and removed."""

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import agl
from agl.algorithms import algorithm
from agl.errors import AglError
from agl.schemas import PromptTemplate, Rollout
from agl_run import Quiet
from worlds.prompts import easy, noisy
from worlds.prompts_optimizer import ScriptedOptimizer

Optimize = Callable[..., Any]

REPEAT = re.compile(r"-(\d+)-\d{5}-\d{3}$")
"""Matches the end of a rollout id: repeat, position, sample."""


def paid_for(run: Any, row: Any, mode: str) -> list[Rollout]:
    """Return the rollouts of one candidate."""
    version = row["versions"].get("clerk_prompt")
    return [rollout for rollout in run.paid if (rollout.mode, rollout.resources["clerk_prompt"]) == (mode, version)]


def test_no_reward_is_paid_twice_and_only_what_passes_its_trial_is_raced(optimize: Optimize) -> None:
    run = optimize(noisy(3), budget=600)
    places = Counter(
        (rollout.resources["clerk_prompt"], rollout.mode, str(rollout.task), REPEAT.findall(rollout.rollout_id)[0])
        for rollout in run.paid
    )
    assert {1} == set(places.values())
    failed = [row for row in run.lineage if row.get("reason", "").startswith("trial:")]
    early = [row for row in run.lineage if "on 8 validation tasks" in row.get("reason", "")]
    assert failed
    assert early
    assert all(not paid_for(run, row, "val") and paid_for(run, row, "train") for row in failed)
    assert all(8 == len({str(r.task) for r in paid_for(run, row, "val")}) for row in early if row["status"] == "beaten")
    assert 3 == max(Counter(row["step"] for row in run.lineage if row.get("operator") == "edit").values())


def test_critics_are_shown_failures_only_and_each_failure_to_one_of_them(optimize: Optimize) -> None:
    asked: list[str] = []

    class Listener(ScriptedOptimizer):
        def respond(self, request: Any) -> Any:
            if request.last_text.startswith("# Job: improve"):
                asked.append(request.last_text)
            return super().respond(request)

    optimize(budget=150, script=Listener(), runners=1)
    rewards = [float(reward) for text in asked for reward in re.findall(r"## Run \d+: reward ([\d.]+)", text)]
    assert rewards
    assert max(rewards) < 1.0
    first = [set(re.findall(r"train-\d+", text)) for text in asked[:3]]
    assert sum(map(len, first)) == len(set[str]().union(*first)) > 3


def test_text_is_on_disk_as_soon_as_it_is_proven_better(optimize: Optimize, tmp_path: Path) -> None:
    path = tmp_path / "run/runs/orders/run-1/apo/best/clerk_prompt.txt"
    seen: dict[str, None] = {}

    def fault(_: Rollout) -> None:
        if path.exists():
            seen[path.read_text(encoding="utf-8")] = None

    run = optimize(budget=250, fault=fault, publish="end")
    chosen = [row["texts"]["clerk_prompt"] for row in run.lineage if row["status"] == "pool"]
    assert len(seen) > 1
    assert set(seen) <= set(chosen)
    assert chosen[0] == next(iter(seen))


def test_best_text_is_measured_once_more_where_nothing_beats_it_for_long(optimize: Optimize) -> None:
    world = noisy(6)
    run = optimize(world, resources=dict(world.solution()), budget=700, patience=8)
    doubted = Counter(
        (rollout.resources["clerk_prompt"], REPEAT.findall(rollout.rollout_id)[0])
        for rollout in run.paid
        if "-doubt-" in rollout.rollout_id
    )
    assert {24} == set(doubted.values())
    assert ("orders-1-initial", "2") in doubted
    assert all(int(repeat) > 1 for _, repeat in doubted), "the final measurement's rollouts stay its own"


def test_rewards_that_do_not_vary_are_measured_once_more_and_not_again(optimize: Optimize) -> None:
    world = msgspec.structs.replace(easy(1), noise=0.0, nagging=0.0)
    script = ScriptedOptimizer(skill=0.0, seed=1)
    run = optimize(world, budget=500, script=script, patience=9)
    doubted = Counter(r.resources["clerk_prompt"] for r in run.paid if "-doubt-" in r.rollout_id)
    assert doubted
    assert {24} == set(doubted.values())


def test_tasks_without_a_failure_leave_nothing_to_learn(optimize: Optimize) -> None:
    world = msgspec.structs.replace(easy(1), noise=0.0)
    train = [{"order": f"o{n}", "fields": {"clerk": ["note"]}, "expected": {"note": "plain"}} for n in range(8)]
    run = optimize(world, train=train, budget=300)
    assert run.stop_reason.startswith("nothing_to_learn:")
    assert 24 + 8 + 2 + 1 == len(run.paid), "and of the trainer's two validations, twice, one is of a test task"


@pytest.mark.parametrize("use", ["random", "gepa"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": 50}, "needs at least"),
        ({"optimizer": {"base_url": "http://127.0.0.1:9/v1", "model": "x"}}, "does not answer"),
        ({"train": easy(1).val}, "validation tasks are training tasks too"),
    ],
)
def test_every_search_refuses_what_cannot_work(
    optimize: Optimize, use: str, change: dict[str, Any], message: str
) -> None:
    if use == "gepa":
        pytest.importorskip("gepa", reason="needs gepa")
    started: list[str] = []
    with pytest.raises(AglError, match=message):
        optimize(use=use, fault=lambda rollout: started.append(rollout.rollout_id), **{"budget": 300, **change})
    assert [] == started


@pytest.mark.parametrize(
    ("tunes", "val", "message"),
    [((), ["v"], "tunes nothing"), (("prompt",), [], "there are no validation tasks")],
)
def test_search_without_a_prompt_or_without_validation_tasks_is_refused(
    tmp_path: Path, tunes: tuple[str, ...], val: list[str], message: str
) -> None:
    trainer = agl.Trainer(
        algorithm=algorithm("apo", tunes=tunes, optimizer={"base_url": "http://x/v1", "model": "x"}),
        initial_resources={name: PromptTemplate(template="Go.") for name in ("prompt", "other")},
        store="memory://",
        folder=tmp_path,
        progress=Quiet(),
    )
    with pytest.raises(AglError, match=message):
        trainer.fit(lambda task: 1.0, ["t"], val)
