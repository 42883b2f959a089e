"""`gepa` in whole experiments on the scripted prompt world."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import agl
from agl import PluginManager
from agl.errors import PluginError
from agl.schemas import Rollout
from agl.stores import MemoryStore
from agl_run import Quiet
from worlds.prompts import PromptWorld, duo, easy
from worlds.prompts_optimizer import ScriptedOptimizer
from worlds.prompts_run import HIDDEN, model_server, order_agent, order_reward

pytest.importorskip("gepa", reason="needs gepa")

SMALL = msgspec.structs.replace(easy(), train_size=16, val_size=24)


def run(world: PromptWorld, folder: Path, optimizer: ScriptedOptimizer, *, workers: int = 8, **params: Any) -> Any:
    """Run one experiment; returns its result, with the number of rollouts that the algorithm started as ``started``."""
    started: list[Rollout] = []

    def note(rollout: Rollout) -> None:
        if rollout.metadata["algorithm"] in ("gepa", "validate"):  # the budget pays for both
            started.append(rollout)

    with model_server(world, optimizer) as server:
        endpoint = {"base_url": server.base_url, "model": "editor", "retry_s": 0.01, "wait_s": 0.2}
        trainer = agl.Trainer(
            name="orders",
            algorithm=agl.GEPA(tunes=list(world.seeds()), **{"optimizer": endpoint, "budget": 200, **params}),
            store=MemoryStore("memory://"),
            n_runners=workers,
            initial_resources=world.seeds(),
            rewards=(order_reward(world),),
            hidden=HIDDEN,
            progress=Quiet(),
            folder=folder,
            workdir=str(folder / "work"),
        )
        trainer.fit(order_agent(world, fault=note), world.train, world.val)
    result = json.loads((folder / "work" / "orders" / "run-1" / "gepa" / "result.json").read_text(encoding="utf-8"))
    return {**result, "started": started}


def test_gepa_improves_within_its_budget_and_reports_fresh_scores(tmp_path: Path) -> None:
    result = run(SMALL, tmp_path, ScriptedOptimizer(), budget=300)
    assert SMALL.gap_closed(result["texts"]) > 0.5
    assert result.get("is_fresh", True)
    assert result["score"]["mean"] > result["seed_score"]["mean"]
    assert len(result["started"]) == result["spent"]["rollouts"] <= 300
    best = (tmp_path / "work" / "orders" / "run-1" / "gepa" / "best" / "clerk_prompt.txt").read_text(encoding="utf-8")
    assert result["texts"]["clerk_prompt"] == best


def test_both_prompts_of_two_roles_are_tuned(tmp_path: Path) -> None:
    world = msgspec.structs.replace(duo(), train_size=16, val_size=24)
    result = run(world, tmp_path, ScriptedOptimizer(), budget=450)
    seeds = {name: prompt.template for name, prompt in world.seeds().items()}
    assert all(result["texts"][name] != text for name, text in seeds.items())


def test_equal_seeds_give_equal_runs_whatever_the_concurrency(tmp_path: Path) -> None:
    one = run(SMALL, tmp_path / "one", ScriptedOptimizer(), workers=1)
    many = run(SMALL, tmp_path / "many", ScriptedOptimizer(), workers=16)
    assert {r.rollout_id for r in one.pop("started")} == {r.rollout_id for r in many.pop("started")}
    assert one == many


def test_phases_share_the_budget_and_go_on_from_the_best(tmp_path: Path) -> None:
    result = run(SMALL, tmp_path, ScriptedOptimizer(), phases=3, budget=300)
    rows = (tmp_path / "work" / "orders" / "run-1" / "gepa" / "lineage.jsonl").read_text(encoding="utf-8").splitlines()
    assert {2, 3, 4} <= {json.loads(row)["step"] for row in rows}
    assert len(result["started"]) <= 300


@pytest.mark.parametrize(
    ("mode", "reason"),
    [("dead", "optimizer_unreachable"), ("broken", "no_proposals"), ("garbage", "no_proposals")],
)
def test_bad_optimizer_ends_the_search_and_what_was_found_is_kept(mode: Any, reason: str, tmp_path: Path) -> None:
    result = run(SMALL, tmp_path, ScriptedOptimizer(mode=mode, after=8), budget=1000)
    assert reason == result["stop_reason"]
    assert len(result["started"]) < 400
    assert SMALL.gap_closed(result["texts"]) > 0.1


def test_broken_templates_cost_no_rollout(tmp_path: Path) -> None:
    result = run(SMALL, tmp_path, ScriptedOptimizer(mode="broken"))
    assert 1 == len({rollout.resources["clerk_prompt"] for rollout in result["started"]})


def test_perfect_score_stops_the_run(tmp_path: Path) -> None:
    world = msgspec.structs.replace(SMALL, rules=SMALL.rules[:2], noise=0.0, nagging=0.0)
    result = run(world, tmp_path, ScriptedOptimizer(skill=1.0), budget=2000)
    assert "perfect" == result["stop_reason"]
    assert 1.0 == result["score"]["mean"]
    assert len(result["started"]) < 300


def test_what_joins_the_pool_was_measured_on_every_validation_task_itself(tmp_path: Path) -> None:
    """The library's own cache would return rewards of training tasks at the same positions."""
    run(SMALL, tmp_path, ScriptedOptimizer())
    rows = (tmp_path / "work" / "orders" / "run-1" / "gepa" / "lineage.jsonl").read_text(encoding="utf-8").splitlines()
    pool = [row for row in map(json.loads, rows) if row["status"] == "pool"]
    assert len(pool) > 2
    assert {len(SMALL.val)} == {row["score"]["n"] for row in pool if row["score"]["how"] == "selection"}


def test_missing_library_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = PluginManager.from_environment()
    for name in ("gepa", "agl_algo_apo.gepa", "agl_algo_apo.proposals.gepa_adapter"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "gepa", None)
    with pytest.raises(PluginError, match=r"agl-algo-apo\[gepa\]"):
        manager.build(manager.algorithm("gepa"), optimizer={"base_url": "http://localhost", "model": "m"})


KILLED = """
import json, os, sys
from pathlib import Path
import agl, agl_run, msgspec
from agl_run import Quiet
from worlds.prompts import easy
from worlds.prompts_run import HIDDEN, order_agent, order_reward

folder, url, kill_at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
world = msgspec.structs.replace(easy(), train_size=16, val_size=16)
ledger = folder / "ledger.txt"

def note(rollout):
    if rollout.metadata["algorithm"] in ("gepa", "validate"):
        with ledger.open("a") as out:
            out.write(rollout.rollout_id + "\\n")
    if len(ledger.read_text().splitlines()) == kill_at if ledger.exists() else False:
        os.kill(os.getpid(), 9)

trainer = agl.Trainer(
    name="orders", n_runners=4, store=f"sqlite:///{folder / 'runs.db'}",
    algorithm=agl.GEPA(tunes="clerk_prompt", optimizer={"base_url": url, "model": "editor"}, budget=200, phases=2),
    initial_resources=world.seeds(), rewards=(order_reward(world),), hidden=HIDDEN, progress=Quiet(),
    folder=folder, workdir=str(folder / "work"), runner=agl_run.runner(max_attempts=3),
)
is_old = (folder / "runs.db").exists()
trainer.fit(order_agent(world, fault=note), world.train, world.val, resume=is_old)
"""


@pytest.mark.long
def test_run_that_was_killed_ends_like_an_unbroken_one(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(KILLED, encoding="utf-8")

    def play(name: str, url: str, kill_at: int) -> int:
        (tmp_path / name).mkdir(exist_ok=True)
        command = [sys.executable, str(script), str(tmp_path / name), url, str(kill_at)]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}  # where `worlds` is
        return subprocess.run(command, check=False, timeout=120, env=env).returncode

    def result(name: str) -> Any:
        return json.loads(
            (tmp_path / name / "work" / "orders" / "run-1" / "gepa" / "result.json").read_text(encoding="utf-8")
        )

    with model_server(SMALL, ScriptedOptimizer()) as server:
        assert 0 == play("whole", server.base_url, 0)
        for kill_at in (60, 150):  # in the first phase, and in the second
            assert -9 == play("cut", server.base_url, kill_at)
        assert 0 == play("cut", server.base_url, 0)
    assert result("whole") == result("cut")
    rows = (
        (tmp_path / "whole" / "work" / "orders" / "run-1" / "gepa" / "lineage.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    assert {2, 3} <= {json.loads(row)["step"] for row in rows}
    paid = (tmp_path / "cut" / "ledger.txt").read_text(encoding="utf-8").splitlines()
    assert len(paid) <= result("whole")["spent"]["rollouts"] + 16
    assert len(set(paid)) == result("whole")["spent"]["rollouts"]
